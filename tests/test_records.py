"""Ways round Flower's record containers."""

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_sap.records import config_of, copy_records, records_of

CONTENT = {
    "c": ConfigRecord({"x": 1}),
    "m": MetricRecord({"loss": 0.5}),
    "d": ConfigRecord({"y": 2}),
}


def test_records_of_a_kind_come_in_their_order():
    content = RecordDict(CONTENT)

    assert records_of(content, ConfigRecord) == [content["c"], content["d"]]
    assert records_of(content, ArrayRecord) == []


def test_the_first_config_stands_for_all_and_an_empty_one_for_none():
    assert config_of(RecordDict(CONTENT)) == ConfigRecord({"x": 1})
    assert config_of(RecordDict()) == ConfigRecord()


def test_a_copy_shares_no_record_with_the_original():
    content = RecordDict(CONTENT)

    copied = copy_records(content)
    copied["c"]["x"] = 9
    copied["new"] = MetricRecord()

    assert dict(content["c"]) == {"x": 1}
    assert list(content) == ["c", "m", "d"]
    assert copy_records(RecordDict()) == RecordDict()
