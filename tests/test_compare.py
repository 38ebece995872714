"""The comparison: its arithmetic by hand, and one small run through the command."""

import dataclasses
import json
import math

import pytest
from typer.testing import CliRunner

from flower_sap.cli import app
from flower_sap.events import read_events
from flower_sap.report.compare import make_plan, run_plan
from flower_sap.report.contenders import AfterReplies, choose, contenders
from flower_sap.report.job import Point, TrialResult
from flower_sap.report.problems import fleet_of, problem
from flower_sap.report.table import (
    Spread,
    draw,
    final_point,
    make_rows,
    seconds_to_target,
    to_plain,
)
from flower_sap.strategies import RoundView


def points(*metrics):
    return [Point(10.0 * i, i, m, (m, m, m)) for i, m in enumerate(metrics)]


def trial(name, seed, *metrics):
    return TrialResult(
        name, seed, "a job", points(*metrics), num_merges=3, num_updates=9,
        mean_staleness=1.5, max_staleness=4, bytes_down=2_000_000, bytes_up=1_000_000,
        idle=0.25, utilization=0.5, num_lost=0, end_time=50.0,
    )  # fmt: skip


def test_the_target_counts_when_the_next_evaluation_confirms_it():
    gtsrb = problem("gtsrb")

    assert seconds_to_target(gtsrb, points(0.1, 0.9, 0.2, 0.9, 0.9), 0.8) == 30.0
    assert math.isinf(seconds_to_target(gtsrb, points(0.1, 0.9, 0.2), 0.8))


def test_an_error_reaches_its_target_from_above():
    parking = problem("parking")

    assert parking.target(0.05) == pytest.approx(0.051)
    assert seconds_to_target(parking, points(0.2, 0.05, 0.05), 0.051) == 10.0


def test_the_final_metric_is_the_mean_of_the_last_three():
    assert final_point(points(9.0, 1.0, 2.0, 3.0)).metric == 2.0


def test_speed_ups_are_taken_seed_by_seed():
    digits = problem("digits")
    results = [
        trial("FedAvg", 0, 0.1, 0.5, 0.5, 0.5, 0.5),
        trial("FedAvg", 1, 0.1, 0.2, 0.2, 0.5, 0.5, 0.5),
        trial("SAP", 0, 0.5, 0.5, 0.5, 0.5),
        trial("SAP", 1, 0.1, 0.5, 0.5, 0.5),
    ]

    baseline, sap = make_rows(digits, results)

    assert baseline.speed_up == Spread(1.0, 1.0, 1.0)
    assert sap.seconds_to_target == Spread(5.0, 0.0, 10.0)
    assert sap.speed_up == Spread(2.0, 1.0, 3.0)


def test_a_target_never_reached_is_null_in_json_and_said_in_the_table():
    digits = problem("digits")
    results = [trial("FedAvg", 0, 0.1, 0.9, 0.9, 0.9), trial("SAP", 0, 0.1, 0.1, 0.1)]

    rows = make_rows(digits, results)

    assert json.loads(json.dumps(to_plain(rows)))[1]["seconds_to_target"] == {
        "median": None,
        "low": None,
        "high": None,
    }
    assert rows[1].seconds_to_target.show(str) == "not reached"
    assert rows[1].worst_tier == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("name", "message"),
    [("fast", "no fleet 'fast': choose mixed"), ("2:4", "no fleet"), ("1:x", "no fl")],
)
def test_an_unknown_fleet_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        fleet_of(name, 4, 0)


def test_a_fleet_file_of_another_size_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(fleet_of("mild", 3, 0).to_toml())

    with pytest.raises(ValueError, match=r"has 3 nodes.*pass --nodes 3"):
        fleet_of(str(path), 4, 0)
    assert fleet_of(str(path), 3, 0).nodes == fleet_of("mild", 3, 0).nodes


def test_an_unknown_data_set_is_refused():
    with pytest.raises(ValueError, match="no data set 'cifar'"):
        problem("cifar")


def test_a_round_of_the_m_replies_rule_starts_its_nodes_together():
    def view(num_buffered):
        return RoundView(
            now=0.0, opened_at=0.0, synced_at=0.0, version=0, oldest_base_version=0,
            merges_since_sync=0, num_buffered=num_buffered, num_in_flight=1,
        )  # fmt: skip

    rule = AfterReplies(2)

    assert rule.may_start(view(0))
    assert not rule.may_start(view(1))
    assert rule.merge_at(view(1)) == math.inf
    assert rule.merge_at(view(2)) == -math.inf


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return the results of a small comparison by one process and by two."""

    def run(workers):
        plan = make_plan(
            problem("parking"), fleet="mild", num_nodes=4, seeds=[0], num_rounds=1,
            contenders=contenders(), folder=tmp_path_factory.mktemp("compare"),
        )  # fmt: skip
        return plan, run_plan(plan, workers=workers)

    return run(1), run(2)


def test_the_number_of_workers_changes_no_result_and_no_event_log(small):
    (one, first), (two, second) = small

    assert first == second
    for who in one.contenders:
        folders = [plan.folder_of(plan.jobs[0], who) for plan in (one, two)]
        logs = [(folder / "events.jsonl").read_bytes() for folder in folders]
        assert logs[0] == logs[1]


def test_every_contender_learns_and_leaves_its_event_log(small):
    (_, results), _ = small

    assert [r.name for r in results] == [
        "FedAvg", "FedAvg+deadline", "FedAsync", "FedBuff", "M-replies", "SAP"
    ]  # fmt: skip
    for result in results:
        assert result.points[-1].metric < result.points[0].metric
        assert 0 <= result.idle < 1
        assert 0 < result.utilization <= 1


def test_a_comparison_goes_on_with_the_trials_of_the_same_job(small, tmp_path):
    def plan_of(rounds):
        return make_plan(
            problem("parking"), fleet="mild", num_nodes=4, seeds=[0], num_rounds=rounds,
            contenders=choose(["FedBuff", "SAP"]), folder=tmp_path,
        )  # fmt: skip

    def age():
        paths = (
            plan.folder_of(plan.jobs[0], c) / "trial.json" for c in plan.contenders
        )
        return [path.stat().st_mtime_ns for path in paths]

    plan = plan_of(1)
    results = run_plan(plan, workers=2)
    (tmp_path / "seed-0" / "FedBuff" / "trial.json").write_text('{"name": "Fed')
    before = age()

    assert run_plan(plan, workers=2, resume=True) == results
    kept = [new == old for new, old in zip(age(), before, strict=True)]
    assert kept == [True, False, True]  # FedAvg, FedBuff, SAP
    assert plan_of(1).jobs[0].fingerprint() == results[0].job
    assert plan_of(2).jobs[0].fingerprint() != results[0].job


def test_contenders_are_chosen_by_name():
    assert [who.name for who in choose(["SAP"])] == ["FedAvg", "SAP"]
    with pytest.raises(ValueError, match=r"no strategy 'sap': choose from FedAvg, "):
        choose(["sap"])


def test_flowers_own_strategy_has_the_models_size_in_its_log_too(small):
    (plan, _), _ = small
    sizes = {
        next(
            iter(read_events(plan.folder_of(plan.jobs[0], who) / "events.jsonl"))
        ).model_nbytes
        for who in plan.contenders
    }

    assert sizes == {4 * 3265}  # one number for all: the float32 parameters


def test_classes_can_follow_device_speed(tmp_path):
    with pytest.raises(ValueError, match="parking has none"):
        make_plan(
            problem("parking"), fleet="mild", num_nodes=4, seeds=[0], num_rounds=1,
            contenders=(), folder=tmp_path, speed_strength=1.0,
        )  # fmt: skip


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_what_it_says(tmp_path):
    result = CliRunner().invoke(
        app,
        ["compare", "--nodes", "4", "--rounds", "1", "--seeds", "1",
         "--out", str(tmp_path / "out")],
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "time to target" in result.output
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"compare.json", "compare.png", "seed-0"} <= written


def test_a_bad_option_is_explained_on_one_line():
    result = CliRunner().invoke(app, ["compare", "--fleet", "fast"])

    assert result.exit_code == 2
    assert "no fleet 'fast'" in result.output


def test_payload_rules_are_rows_of_their_own():
    rows = choose(["SAP"], ["adaptive", "1/32"])

    assert [row.name for row in rows] == ["FedAvg", "SAP", "SAP adaptive", "SAP 1/32"]
    assert [row.is_sized for row in rows] == [False, False, True, True]


@pytest.mark.parametrize("word", ["most", "1/0", "-1/8"])
def test_an_unknown_payload_rule_is_refused(word):
    with pytest.raises(ValueError, match=r"payload rule|share must be > 0"):
        choose([], [word])


def test_sized_uploads_are_compared_through_the_command(tmp_path):
    result = CliRunner().invoke(
        app,
        [
            "compare", "--data", "parking", "--nodes", "4", "--seeds", "1", "--rounds",
            "2", "--strategy", "SAP", "--payload", "1/3", "--uplinks", "0.01:0.02",
            "--workers", "1", "--out", str(tmp_path), "--json",
        ],
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows["SAP 1/3"]["relative_error"]["median"] > 0
    assert rows["SAP"]["relative_error"]["median"] == 0
    kbytes = {name: row["kbytes_per_update"]["median"] for name, row in rows.items()}
    assert kbytes["SAP 1/3"] < 0.5 * kbytes["SAP"]
    assert not list(tmp_path.rglob("residuals"))


def test_uplinks_that_are_no_range_are_refused(tmp_path):
    result = CliRunner().invoke(
        app, ["compare", "--uplinks", "fast", "--out", str(tmp_path)]
    )

    assert result.exit_code == 2
    assert "from:to in Mbit/s" in result.output


def test_the_table_tells_of_payloads_where_there_are_some():
    plain = [trial(name, 0, 0.1, 0.5, 0.5, 0.5) for name in ("FedAvg", "SAP")]
    sized = dataclasses.replace(plain[1], name="SAP 1/32", relative_error=0.25)

    def headings(results):
        table = draw(make_rows(problem("digits"), results), "accuracy", "title")
        return [str(column.header) for column in table.columns]

    assert "rel. error" not in headings(plain)
    assert headings([*plain, sized])[-2:] == ["kB/update", "rel. error"]
