"""The one place where settings are judged: what was given, name by name, and then all of it together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvferry.app.settings.checks import Spell, broken_rules
from kvferry.app.settings.fields import SettingFields
from kvferry.app.settings.layers import CONFIG, URL, Names
from kvferry.app.settings.offered import not_offered
from kvferry.app.settings.origin import DEFAULT, RUNTIME, Given
from kvferry.app.settings.problems import BadSettings, Problem, unknown_problem, value_problem
from kvferry.app.settings.view import plain


class Report:
    """All that is wrong with a set of settings, gathered before anything is refused."""

    def __init__(self, names: Names) -> None:
        self.problems: dict[str, Problem] = {}
        self.known: dict[str, Given] = {}
        self._names = names

    def take(self, given: Mapping[str, Given]) -> dict[str, Any]:
        """Note unknown names and what could not be read; return the values that can be validated."""
        for name, item in given.items():
            if item.foreign:
                continue
            if item.trouble is not None:
                self.problems[name] = value_problem(name, item, item.trouble, secret=self._hides(name, item))
            elif name in self._names.settings:
                self.known[name] = item
            elif name not in (URL, CONFIG) or item.place is RUNTIME:
                known = self._names.settings if item.place is RUNTIME else self._names.spellings()
                self.problems[name] = unknown_problem(item, known, self._names.secrets)
        return {name: item.value for name, item in self.known.items()}

    def take_errors(self, error: ValidationError) -> None:
        """Note values that are not of their setting's kind."""
        for item in error.errors(include_url=False, include_context=False):
            name = str(item["loc"][0])
            advice = item["msg"].removeprefix("Value error, ")
            self.problems[name] = value_problem(name, self.known[name], advice, secret=name in self._names.secrets)

    def take_rules(self, settings: SettingFields) -> None:
        """Note values that this version does not offer, and rules between settings that do not hold."""
        for name in self._names.settings:
            refused = not_offered(name, getattr(settings, name)) if name not in self.problems else None
            if refused is not None:
                self._blame(settings, name, refused)
        for name, advice in broken_rules(settings, set(self.problems), self._speller):
            self._blame(settings, name, advice)

    def raise_if_bad(self) -> None:
        """Refuse, naming everything."""
        if self.problems:
            raise BadSettings(self.problems.values())

    def _speller(self, blamed: str) -> Spell:
        """How other settings are named in a message about `blamed`: as they were given, else as `blamed` was."""
        place = self.known[blamed].place if blamed in self.known else DEFAULT
        return lambda name: self.known[name].spelled if name in self.known else place.spell(name)

    def _blame(self, settings: SettingFields, name: str, advice: str) -> None:
        value = plain(name, getattr(settings, name))
        item = self.known.get(name) or Given(value, DEFAULT, DEFAULT.spell(name))
        self.problems[name] = value_problem(name, item, advice, secret=name in self._names.secrets)

    def _hides(self, name: str, item: Given) -> bool:
        """Whether the value in trouble is a secret itself, and not the path of its file."""
        return name in self._names.secrets and item.spelled.lower().endswith(name)


def notices(given: Mapping[str, Given]) -> tuple[str, ...]:
    """What was ignored and deserves one warning."""
    foreign = sorted(item.spelled for item in given.values() if item.foreign)
    if not foreign:
        return ()
    return (
        f"ignored {len(foreign)} environment variables that Kubernetes injects for a service called kvferry "
        f"({', '.join(foreign)}); set enableServiceLinks: false in the pod to be rid of them",
    )
