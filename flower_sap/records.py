"""Small ways round Flower's record containers, for the paths that every message takes.

`RecordDict.config_records` and its like build a synchronized view at each access,
which costs more than all the engine does with what they hold.
"""

import copy
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord, MetricRecord)


def records_of(content: RecordDict, kind: type[_Record]) -> list[_Record]:
    """Return the records of one kind, in order."""
    return [record for record in content.values() if isinstance(record, kind)]


def config_of(content: RecordDict) -> ConfigRecord:
    """Return the first config record, or an empty one."""
    return next(iter(records_of(content, ConfigRecord)), ConfigRecord())


def copy_records(records: RecordDict) -> RecordDict:
    """Return new records over the same values, with arrays and lists of their own.

    The bytes of an array are shared: nobody can write to them.
    """
    copied = RecordDict()
    for key, record in records.items():
        # Flower's constructors would check each value again: three times the cost.
        own: Any = record.copy()
        for name, value in record.items():
            if isinstance(value, Array | list):
                own[name] = copy.copy(value)
        copied[key] = own
    return copied
