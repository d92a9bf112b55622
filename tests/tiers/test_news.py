"""Who waits for what tiers say is woken by them, and does not look again and again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from kvferry.app.tiers.opening import TierNews
from tests.harness.tier_rig import WAIT_S


def test_who_waits_hears_of_news_and_of_those_that_came_just_before() -> None:
    news, also = TierNews(), threading.Event()
    heard = news.count
    news.telling(also.set)()
    assert also.is_set()
    news.wait(heard, WAIT_S)
    heard = news.count
    news.wait(heard, 0.0)
    assert news.count == heard
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(news.wait, heard, 2 * WAIT_S)
        assert not waiting.done()
        news.tell()
        waiting.result(WAIT_S)
    assert news.count == heard + 1
