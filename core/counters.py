"""Declaration of counters: description and Prometheus metric stand at the field of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Metric:
    """Prometheus metric of a field, without the prefix `kvferry_` and the suffix `_total`.

    Fields of one name make one family; `label` is a label's name and its value for the field. Of a field that counts by
    name (a dict), the value is a prefix of the names.
    """

    name: str
    help: str
    is_gauge: bool
    label: tuple[str, str] | None


def counter(
    description: str,
    metric: str | None = None,
    *,
    gauge: bool = False,
    label: tuple[str, str] | None = None,
    help: str | None = None,  # noqa: A002
    default: Any = 0,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """Declare a counter as the field of a dataclass.

    Args:
        description: for people, in the API's description and in the metric.
        metric: name of its metric; None for a number that others add up to.
        gauge: whether it may decrease.
        label: see `Metric`.
        help: description of the metric's family where that has several fields.
        default: value of a new instance.
        factory: makes the value of a new instance, instead of `default`.
    """
    declared = None if metric is None else Metric(metric, help or description, gauge, label)
    metadata = {"description": description, "metric": declared}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def gauge(description: str, metric: str | None = None, **others: Any) -> Any:
    """Declare a number that may decrease; see `counter`."""
    return counter(description, metric, gauge=True, **others)


def metric_of(counted: Field[Any]) -> Metric | None:
    """Return the metric of a dataclass's field, None without one."""
    metric = counted.metadata.get("metric")
    return metric if isinstance(metric, Metric) else None


@lru_cache(maxsize=64)
def _names(cls: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(cls))


def copy_counts(counts: T) -> T:
    """Return a copy of a dataclass, of its dicts, and of the mutable dataclasses in it."""
    return type(counts)(*[_copied(getattr(counts, name)) for name in _names(type(counts))])


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    kind: type = type(value)
    return copy_counts(value) if _is_mutable(kind) else value


@lru_cache(maxsize=256)
def _is_mutable(kind: type) -> bool:
    # A mutable dataclass cannot be hashed.
    return is_dataclass(kind) and kind.__hash__ is None
