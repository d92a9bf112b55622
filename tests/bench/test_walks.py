"""Code walks: each operation is traced, and did what its name says (the tool raises where one did not)."""

from __future__ import annotations

from bench.walks import CoreWalks, Walk, http_walks, listing, table


def check(walks: list[Walk], folder: str) -> None:
    for walk in walks:
        files = walk.files("core") | walk.files("app")
        assert walk.files(folder), walk.operation
        assert len(files) - 1 <= walk.num_moves_by_call <= walk.num_moves <= 2 * len(walk.calls), walk.operation
        assert walk.operation in table([walk])
        assert len(listing(walk).splitlines()) == len(walk.calls)


def test_walks_when_run_twice_count_the_same_calls_of_core() -> None:
    CoreWalks().run()
    walks = CoreWalks().run()
    check(walks, "core")
    assert len({walk.operation for walk in walks}) == 8
    assert [walk.calls for walk in walks] == [walk.calls for walk in CoreWalks().run()]


def test_walks_when_run_trace_http_calls_into_app() -> None:
    walks = http_walks()
    check(walks, "app")
    assert [walk.operation for walk in walks] == ["HTTP GET stats", "HTTP PUT override"]
    assert any(file.startswith("app/store/") for file in walks[1].files("app")), "work on other threads is traced"
