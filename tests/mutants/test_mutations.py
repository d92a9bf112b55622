"""Every mutation can still be made, and the tests named for it exist; `make mutants` says whether they go red."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_applies_and_is_python(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.path} has {mutation.old!r} {text.count(mutation.old)} times"
    mutant = text.replace(mutation.old, mutation.new)
    assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(text))


def test_its_tests_exist() -> None:
    for mutation in MUTATIONS:
        assert mutation.tests
        for test in mutation.tests:
            path, _, name = test.partition("::")
            assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{mutation.name}: there is no {test}"


def test_every_rule_is_broken_and_no_name_is_used_twice() -> None:
    assert {mutation.number for mutation in MUTATIONS} == set(range(1, 15))
    assert Counter(mutation.name for mutation in MUTATIONS).most_common(1)[0][1] == 1
