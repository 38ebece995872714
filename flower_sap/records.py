"""Small ways round Flower's record containers, for the paths that every message takes.

`RecordDict.config_records` and its like build a synchronized view at each access,
which costs more than all the engine does with what they hold.
"""

from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord, MetricRecord)


def records_of(content: RecordDict, kind: type[_Record]) -> list[_Record]:
    """Return the records of one kind, in order."""
    return [record for record in content.values() if isinstance(record, kind)]


def config_of(content: RecordDict) -> ConfigRecord:
    """Return the first config record, or an empty one."""
    return next(iter(records_of(content, ConfigRecord)), ConfigRecord())


def copy_records(records: RecordDict) -> RecordDict:
    """Return new records over the same values, with lists of their own."""
    if not records:
        return RecordDict()
    return RecordDict(
        {
            key: type(record)({name: _own(value) for name, value in record.items()})
            for key, record in records.items()
        }
    )


def _own(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
