"""The app of a node: what it learns, what it replies, and that nothing else matters."""

import copy
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flower_sap.clients.app import Learner, client_app
from flower_sap.clients.local_sgd import LocalSgd, batches
from flower_sap.clients.task import (
    Task,
    absolute_error,
    correctness,
    digits_task,
    evaluate,
    gtsrb_task,
    initial_arrays,
    parking_task,
)
from flower_sap.clients.weights import ModelArrays
from flower_sap.data import Baseline, Examples, FederatedData
from flower_sap.isolation import one_thread


def line_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))


def statistics_model() -> nn.Module:
    """Return a model with dropout and with an integer buffer."""
    return nn.Sequential(
        nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1), nn.Flatten(0)
    )


def dropout_model() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1), nn.Flatten(0))


def mixed_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double())


LINE = Task(
    model=line_model,
    loss=nn.functional.mse_loss,
    score=absolute_error,
    metric="mae",
    higher_is_better=False,
    learning_rate=0.1,
    momentum=0.5,
    batch_size=4,
)
STATISTICS = replace(LINE, model=statistics_model)


def line_examples(n: int, seed: int) -> Examples:
    x = np.random.default_rng([seed]).normal(size=(n, 2)).astype(np.float32)
    return Examples(x, x @ np.array([1.0, -2.0], np.float32), np.arange(n))


DATA = FederatedData.with_own_test(
    "line",
    [line_examples(10, 0), line_examples(7, 1)],
    test=[line_examples(3, 2), line_examples(0, 3)],
    baseline=Baseline("none", np.zeros(3)),
)


def message(arrays: ArrayRecord, kind: str, config: dict[str, object]) -> Message:
    # With metadata given, as Flower wants a running task to fill them in otherwise.
    metadata = Metadata(1, "m", 1, 2, "", "", 0.0, 3600.0, kind)
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    return Message(metadata=metadata, content=content)


def context(node: object) -> Context:
    return Context(1, 2, {"partition-id": node}, RecordDict(), {})


def train(
    app: ClientApp, *, node: int = 0, task: Task = LINE, **config: object
) -> tuple[ArrayRecord, MetricRecord]:
    keys = {key.replace("_", "-"): value for key, value in config.items()}
    request = message(initial_arrays(task, 0), "train", {"server-round": 1} | keys)
    content = app(request, context(node)).content
    return content["arrays"], content["metrics"]


def as_bytes(arrays: ArrayRecord) -> dict[str, bytes]:
    return {key: array.data for key, array in arrays.items()}


def app_of(task: Task = LINE, seed: int = 0) -> ClientApp:
    return client_app(task, DATA, seed=seed)


# The work asked for


def test_local_steps_are_counted_exactly_across_epochs():
    _, metrics = train(app_of(), local_steps=5, local_epochs=9)

    # 10 examples in batches of 4: 4 + 4 + 2, then a new epoch.
    assert metrics["num-steps"] == 5
    assert metrics["samples-processed"] == 18
    assert metrics["num-examples"] == 10


def test_without_a_number_of_steps_a_node_trains_for_one_epoch():
    _, metrics = train(app_of(), node=1)

    assert (metrics["num-steps"], metrics["samples-processed"]) == (2, 7)


def test_two_epochs_are_as_many_steps_as_two_epochs_take():
    by_epochs, _ = train(app_of(), local_epochs=2)
    by_steps, _ = train(app_of(), local_steps=6)

    assert as_bytes(by_epochs) == as_bytes(by_steps)


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 30))
def test_every_epoch_meets_every_example_once(num_examples, batch_size, num_steps):
    rng = np.random.default_rng([0])

    met = np.concatenate(list(batches(num_examples, batch_size, num_steps, rng=rng)))

    whole = len(met) // num_examples * num_examples
    epochs = np.sort(met[:whole].reshape(-1, num_examples), axis=1)
    assert (epochs == np.arange(num_examples)).all()
    assert len(np.unique(met[whole:])) == len(met) - whole


def test_epochs_are_shuffled_anew():
    first, second = batches(50, 50, 2, rng=np.random.default_rng([0]))

    assert first.tolist() != second.tolist()


def test_the_learning_rate_of_the_message_replaces_that_of_the_task():
    from_message, _ = train(app_of(), learning_rate=0.02)
    from_task, _ = train(app_of(replace(LINE, learning_rate=0.02)))

    assert as_bytes(from_message) == as_bytes(from_task)
    assert as_bytes(from_message) != as_bytes(train(app_of())[0])


def test_the_reported_loss_is_the_mean_over_the_examples_met():
    _, metrics = train(app_of(replace(LINE, batch_size=10)), local_steps=1)

    errors = evaluate(LINE, initial_arrays(LINE, 0), DATA.train[0])
    assert metrics["train-loss"] == pytest.approx(np.mean(errors**2), rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_sgd_takes_the_steps_of_torch_sgd(momentum):
    examples = DATA.train[0]
    ours, theirs = line_model(), line_model()
    ours.load_state_dict(theirs.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum)
    x, y = torch.from_numpy(examples.x), torch.from_numpy(examples.y)

    sgd = LocalSgd(ours, loss=nn.functional.mse_loss, momentum=momentum, batch_size=4)
    rng = np.random.default_rng([7])
    sgd.run(examples, num_steps=8, learning_rate=0.1, rng=rng)
    for index in batches(10, 4, 8, rng=np.random.default_rng([7])):
        optimizer.zero_grad()
        nn.functional.mse_loss(theirs(x[index]), y[index]).backward()
        optimizer.step()

    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        # The same sums in the same order: a fused multiply-add is all that may differ.
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_parameters_of_two_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"one dtype, got 2: .*float32.*float64"):
        LocalSgd(mixed_model(), loss=nn.functional.mse_loss, momentum=0.0, batch_size=1)


# What a reply depends on


def test_the_reply_does_not_depend_on_what_the_process_did_before():
    used = app_of(STATISTICS)
    train(used, task=STATISTICS, node=1, server_round=9)

    again, metrics = train(used, task=STATISTICS)
    fresh, fresh_metrics = train(app_of(STATISTICS), task=STATISTICS)

    assert as_bytes(again) == as_bytes(fresh)
    assert dict(metrics) == dict(fresh_metrics)


def test_an_evaluation_in_between_does_not_enter_the_reply():
    used = app_of(STATISTICS)
    used(message(initial_arrays(STATISTICS, 1), "evaluate", {}), context(0))

    after = train(used, task=STATISTICS)[0]

    assert as_bytes(after) == as_bytes(train(app_of(STATISTICS), task=STATISTICS)[0])


@pytest.mark.parametrize("change", [{"node": 1}, {"server_round": 2}])
def test_another_node_or_round_shuffles_in_another_way(change):
    same_everywhere = replace(DATA, train=(DATA.train[0], DATA.train[0]))
    app = client_app(LINE, same_everywhere, seed=0)

    assert as_bytes(train(app, **change)[0]) != as_bytes(train(app)[0])


def test_dropout_is_drawn_anew_for_each_round():
    task = replace(LINE, model=dropout_model)
    # One example, so that there is nothing to shuffle.
    data = replace(DATA, train=(line_examples(1, 0),))
    app = client_app(task, data, seed=0)

    replies = [train(app, task=task, server_round=n)[0] for n in range(6)]

    assert len({reply["1.weight"].data for reply in replies}) > 1


def test_another_seed_shuffles_in_another_way():
    assert as_bytes(train(app_of(seed=1))[0]) != as_bytes(train(app_of())[0])


def test_the_dispatch_number_decides_the_shuffle_where_there_is_one():
    app = app_of()

    third = train(app, dispatch_number=3, server_round=1)[0]

    assert as_bytes(third) == as_bytes(train(app, dispatch_number=3, server_round=2)[0])
    assert as_bytes(third) == as_bytes(train(app, server_round=3)[0])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_training_leaves_the_global_generators_and_threads_alone():
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002

    train(app_of(STATISTICS), task=STATISTICS)

    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.get_num_threads() == 2


def test_the_state_of_the_global_generators_does_not_enter_the_reply():
    first = train(app_of(STATISTICS), task=STATISTICS)[0]
    with torch.random.fork_rng(devices=[]):
        torch.rand(3)

        second = train(app_of(STATISTICS), task=STATISTICS)[0]

    assert as_bytes(first) == as_bytes(second)


def test_the_message_is_not_changed():
    request = message(initial_arrays(LINE, 0), "train", {"server-round": 1})
    before = as_bytes(request.content["arrays"])

    app_of()(request, context(0))

    assert as_bytes(request.content["arrays"]) == before


def test_a_reply_is_not_changed_by_the_next_one():
    app = app_of()
    first = train(app)[0]
    before = as_bytes(first)

    train(app, node=1)

    assert as_bytes(first) == before


def test_a_used_learner_can_be_copied_to_another_process():
    learner = Learner(LINE, DATA, 0)
    request = message(initial_arrays(LINE, 0), "train", {"server-round": 1})
    here = learner.train(request, context(0)).content["arrays"]

    there = copy.copy(learner).train(request, context(0)).content["arrays"]

    assert as_bytes(there) == as_bytes(here)


# Messages that are refused


@pytest.mark.parametrize("key", ["local-steps", "local-epochs"])
@pytest.mark.parametrize("value", [0, -3, 1.0, True, "2"])
def test_an_amount_of_work_that_is_no_positive_int_is_refused(key, value):
    request = message(initial_arrays(LINE, 0), "train", {"server-round": 1, key: value})

    with pytest.raises(ValueError, match=f"'{key}' must be an int >= 1, got {value!r}"):
        app_of()(request, context(0))


@pytest.mark.parametrize("value", [0.0, -0.1, float("nan"), float("inf"), True, "0.1"])
def test_a_learning_rate_that_is_no_positive_number_is_refused(value):
    with pytest.raises(ValueError, match=f"finite number > 0, got {value!r}"):
        train(app_of(), learning_rate=value)


@pytest.mark.parametrize("value", [-1, 1.5])
def test_a_dispatch_number_that_is_no_whole_number_is_refused(value):
    with pytest.raises(ValueError, match=f"'dispatch-number' .* >= 0, got {value}"):
        train(app_of(), dispatch_number=value)


def test_a_message_without_version_or_round_is_refused():
    request = message(initial_arrays(LINE, 0), "train", {})

    with pytest.raises(
        ValueError, match="'server-round' must be an int >= 0, got None"
    ):
        app_of()(request, context(0))


@pytest.mark.parametrize("node", [2, -1, "0"])
def test_a_partition_that_does_not_exist_is_refused(node):
    request = message(initial_arrays(LINE, 0), "train", {"server-round": 1})

    with pytest.raises(ValueError, match=rf"partition-id in \[0, 1\] .* got {node!r}"):
        app_of()(request, context(node))


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_message_without_a_model_is_refused(kind):
    request = message(ArrayRecord(), kind, {"server-round": 1})
    del request.content["arrays"]

    with pytest.raises(ValueError, match="an ArrayRecord under 'arrays', got NoneType"):
        app_of()(request, context(0))


def test_a_config_of_another_kind_is_refused():
    request = message(initial_arrays(LINE, 0), "train", {})
    request.content["config"] = MetricRecord({"server-round": 1})

    with pytest.raises(ValueError, match="must be a ConfigRecord, got MetricRecord"):
        app_of()(request, context(0))


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        app_of(seed=-1)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("learning_rate", 0.0, "learning_rate must be finite and > 0, got 0.0"),
        ("momentum", 1.0, r"momentum must be in \[0, 1\), got 1.0"),
        ("batch_size", 0, "batch_size must be >= 1 example, got 0"),
    ],
)
def test_a_task_out_of_range_is_refused(field, value, expected):
    with pytest.raises(ValueError, match=expected):
        replace(LINE, **{field: value})


# Arrays


def test_arrays_survive_the_way_through_a_model_with_their_dtypes_and_shapes():
    arrays = initial_arrays(STATISTICS, 0)
    arrays["0.num_batches_tracked"] = Array(np.array(41))
    model = statistics_model()
    weights = ModelArrays(model)

    weights.load(arrays)

    assert int(model[0].num_batches_tracked) == 41
    assert as_bytes(weights.store()) == as_bytes(arrays)
    assert [a.shape for a in arrays.values()] == [
        a.shape for a in weights.store().values()
    ]


def test_a_training_step_counts_in_an_integer_buffer():
    arrays, _ = train(app_of(STATISTICS), task=STATISTICS, local_steps=4)

    counter = arrays["0.num_batches_tracked"].numpy()
    assert (counter.dtype, counter.shape, int(counter)) == (np.int64, (), 4)


@pytest.mark.parametrize("model", [line_model, statistics_model])
def test_stored_arrays_are_the_bytes_that_flower_writes(model):
    built = model()

    ours = ModelArrays(built).store()

    theirs = ArrayRecord(built.state_dict())
    assert list(ours) == list(theirs)
    assert all(ours[key] == theirs[key] for key in theirs)


@pytest.mark.parametrize("layout", ["float64", "fortran", "big-endian"])
def test_arrays_in_another_layout_are_read_as_well(layout):
    value = np.array([[0.25, -4.0]], np.float32)
    other = {
        "float64": value.astype(np.float64),
        "fortran": np.asfortranarray(np.broadcast_to(value, (1, 2))),
        "big-endian": value.astype(">f4"),
    }[layout]
    model = line_model()
    arrays = initial_arrays(LINE, 0)
    arrays["0.weight"] = Array(other)

    ModelArrays(model).load(arrays)

    assert model[0].weight.tolist() == value.tolist()


def test_an_array_of_another_shape_is_refused_and_not_broadcast():
    arrays = initial_arrays(LINE, 0)
    arrays["0.weight"] = Array(np.zeros((1, 1), np.float32))

    with pytest.raises(ValueError, match=r"'0.weight' has shape \(1, 1\), .* \(1, 2\)"):
        evaluate(LINE, arrays, DATA.test)


def test_a_float_for_an_integer_buffer_is_refused():
    arrays = initial_arrays(STATISTICS, 0)
    arrays["0.num_batches_tracked"] = Array(np.array(4.5))

    with pytest.raises(TypeError, match="float64, the model wants int64: cast it back"):
        evaluate(STATISTICS, arrays, DATA.test)


def test_missing_and_unknown_arrays_are_named():
    arrays = initial_arrays(LINE, 0)
    arrays["head"] = arrays.pop("0.bias")

    with pytest.raises(
        ValueError, match=r"\['0.bias'\] are missing and \['head'\] are"
    ):
        evaluate(LINE, arrays, DATA.test)


def test_an_array_whose_bytes_are_cut_off_is_refused():
    arrays = initial_arrays(LINE, 0)
    whole = arrays["0.weight"]
    arrays["0.weight"] = Array("float32", (1, 2), whole.stype, whole.data[:-3])

    with pytest.raises(ValueError, match=r"cannot reshape|[Ee]xpected|read"):
        evaluate(LINE, arrays, DATA.test)


def test_an_array_of_an_unknown_encoding_is_refused():
    arrays = initial_arrays(LINE, 0)
    whole = arrays["0.weight"]
    arrays["0.weight"] = Array("float32", (1, 2), "flower-sap/x/1", whole.data)

    with pytest.raises(TypeError, match="flower-sap/x/1"):
        evaluate(LINE, arrays, DATA.test)


# Initial arrays and evaluation


def test_the_first_arrays_depend_on_the_seed_alone():
    first, other = initial_arrays(LINE, 0), initial_arrays(LINE, 1)
    with torch.random.fork_rng(devices=[]):
        torch.rand(3)

        again = initial_arrays(LINE, 0)

    assert as_bytes(first) == as_bytes(again)
    assert as_bytes(first) != as_bytes(other)


def test_building_a_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()

    initial_arrays(LINE, 0)

    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_gives_one_score_per_example():
    arrays = ArrayRecord(
        {
            "0.weight": Array(np.array([[1.0, -2.0]], np.float32)),
            "0.bias": Array(np.array([0.5], np.float32)),
        }
    )

    scores = evaluate(LINE, arrays, line_examples(600, 5))

    assert (scores.shape, scores.dtype) == ((600,), np.float64)
    assert np.allclose(scores, 0.5, atol=1e-5)


def test_evaluation_uses_the_running_statistics_and_no_dropout():
    arrays = initial_arrays(STATISTICS, 0)

    assert np.array_equal(
        evaluate(STATISTICS, arrays, DATA.test), evaluate(STATISTICS, arrays, DATA.test)
    )


def test_a_node_evaluates_on_its_own_test_rows():
    arrays = initial_arrays(LINE, 0)

    reply = app_of()(message(arrays, "evaluate", {}), context(0)).content["metrics"]

    expected = float(evaluate(LINE, arrays, DATA.test_of(0)).mean())
    assert dict(reply) == {"mae": expected, "num-examples": 3}


def test_a_node_without_test_rows_reports_a_weight_of_zero():
    arrays = initial_arrays(LINE, 0)

    reply = app_of()(message(arrays, "evaluate", {}), context(1)).content["metrics"]

    assert dict(reply) == {"mae": 0.0, "num-examples": 0}


@pytest.mark.usefixtures("two_threads")
def test_the_threads_are_given_back_after_a_failure():
    with pytest.raises(ZeroDivisionError, match="division by zero"), one_thread():
        1 / (torch.get_num_threads() - 1)

    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("task", "x", "output"),
    [
        (parking_task(), (3, 17), (3,)),
        (gtsrb_task(), (3, 3, 32, 32), (3, 43)),
        (digits_task(), (3, 64), (3, 10)),
    ],
)
def test_the_models_fit_their_data(task, x, output):
    assert task.model()(torch.zeros(x)).shape == output


def test_an_absolute_error_has_no_sign_and_correctness_is_one_or_zero():
    error = absolute_error(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.5]))
    correct = correctness(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1]))

    assert error.tolist() == [2.0, 0.5]
    assert correct.tolist() == [1.0, 0.0]


def test_training_a_line_finds_it():
    arrays, _ = train(app_of(), local_steps=200)

    assert evaluate(LINE, arrays, DATA.test).max() < 0.01
