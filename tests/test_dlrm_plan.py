"""`intune plan`: every row is placed once, what is placed fits, what does not fit is told, and with what it would."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_examples.models.sizes import DLRMConfig
from dlrm_examples.models.tables import MLPERF_BAGS, TABLES
from dlrm_examples.plan.costs import DTYPES, OPTIMIZERS, Job, Machine, Table
from dlrm_examples.plan.placement import DoesNotFit, Plan, make_plan

GIB, GB = 1 << 30, 10**9
PAPER, FULL = "criteo-1tb-40m", "criteo-1tb-full"


def criteo(name: str, **options) -> Job:
    return Job(tuple(Table(f"C{index}", rows) for index, rows in enumerate(TABLES[name], 1)), **options)


def kinds(plan: Plan) -> dict[str, int]:
    return {kind: len({s.table for s in plan.shards if s.kind == kind}) for kind in ("table-wise", "row-wise", "host")}


def check(plan: Plan) -> None:
    """Recompute everything from the shards alone."""
    job, machine = plan.job, plan.machine
    used, host = [0] * machine.gpus, 0
    for index, table in enumerate(job.tables):
        shards = sorted(plan.of_table(index), key=lambda shard: shard.first_row)
        assert [shard.first_row for shard in shards] == [0, *(shard.end_row for shard in shards[:-1])]
        assert shards[-1].end_row == table.rows
        assert len({shard.kind for shard in shards}) == 1
        assert len({shard.gpu for shard in shards}) == len(shards), "one part of a table per GPU"
        if shards[0].kind != "row-wise":
            assert len(shards) == 1
        for shard in shards:
            assert shard.rows > 0
            size = shard.rows * job.row_bytes
            exchanged = 2 * 4 * job.dim * job.batch_size
            used[shard.gpu] += exchanged + (0 if shard.kind == "host" else size)
            host += size if shard.kind == "host" else 0
    own = 2 * 4 * job.dim * len(job.tables) * -(-job.batch_size // machine.gpus)
    assert plan.gpu_bytes == [job.mlp_bytes + own + size for size in used]
    assert plan.host_bytes == host
    assert max(plan.gpu_bytes) <= machine.hbm_bytes * (1 - job.reserve_frac)
    assert host <= machine.host_bytes * (1 - job.reserve_frac)


@pytest.mark.parametrize(
    ("job", "machine", "expected"),
    [
        (criteo(PAPER), Machine(8, 40 * GIB), {"table-wise": 21, "row-wise": 5, "host": 0}),
        (criteo(PAPER), Machine(4, 40 * GIB), {"table-wise": 25, "row-wise": 1, "host": 0}),
        (criteo(PAPER), Machine(2, 40 * GIB, 500 * GB), {"table-wise": 23, "row-wise": 1, "host": 2}),
        (criteo(PAPER), Machine(1, 40 * GIB, 300 * GB), {"table-wise": 22, "row-wise": 0, "host": 4}),
        (criteo(FULL), Machine(8, 40 * GIB, 1024 * GIB), {"table-wise": 20, "row-wise": 4, "host": 2}),
        (criteo(FULL, dtype="fp16"), Machine(8, 40 * GIB), {"table-wise": 21, "row-wise": 5, "host": 0}),
        (criteo(FULL), Machine(16, 40 * GIB), {"table-wise": 21, "row-wise": 5, "host": 0}),
        (criteo("criteo-kaggle", dim=16), Machine(8, 40 * GIB), {"table-wise": 26, "row-wise": 0, "host": 0}),
    ],
)
def test_the_machines_of_the_notes(job: Job, machine: Machine, expected: dict[str, int]) -> None:
    plan = make_plan(job, machine)
    check(plan)
    assert kinds(plan) == expected
    used = plan.gpu_bytes
    assert max(used) - sum(used) / len(used) <= 0.05 * job.usable(machine.hbm_bytes)


def test_the_papers_model() -> None:
    job = criteo(PAPER)
    assert job.rows * job.dim == 26_135_627_264
    plan = make_plan(job, Machine(8, 40 * GIB))
    assert {plan.job.tables[s.table].rows for s in plan.shards if s.kind == "row-wise"} == {40_000_000}
    assert plan.imbalance < 1.1
    sent = [moved.embeddings for moved in plan.traffic]
    assert max(sent) < 1.3 * min(sent)


def test_one_small_gpu_is_told_what_it_lacks() -> None:
    job, machine = criteo(PAPER), Machine(1, 16 * GIB, 48 * GB)
    with pytest.raises(DoesNotFit, match=r"101\.4 GiB and 51\.6 GiB are usable: 49\.8 GiB too much") as caught:
        make_plan(job, machine)
    assert {words.split()[0] for words in caught.value.cures} == {"--gpus", "--host", "--max-rows"}


@pytest.mark.parametrize(
    ("job", "machine"),
    [
        (criteo(PAPER), Machine(1, 16 * GIB, 48 * GB)),
        (criteo(FULL), Machine(8, 40 * GIB)),
        (criteo(PAPER, optimizer="adagrad"), Machine(4, 40 * GIB)),
        (criteo(PAPER, batch_size=4_000_000), Machine(8, 40 * GIB)),
        (Job((Table("one", 200_000_000), Table("two", 200_000_000))), Machine(1, 1 * GIB, 100 * GIB)),
    ],
)
def test_what_is_said_to_fit_fits_and_a_little_less_does_not(job: Job, machine: Machine) -> None:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(job, machine)
    cures = caught.value.cures
    assert cures
    for words in cures:
        option, value = words.split()
        changed, less = {
            "--gpus": lambda v: [(job, replace(machine, gpus=int(v) - k)) for k in (0, 1)],
            "--host": lambda v: [(job, replace(machine, host_bytes=(int(v[:-3]) - k) * GIB)) for k in (0, 1)],
            "--dtype": lambda v: [(replace(job, dtype=v), machine), None],
            "--optimizer": lambda v: [(replace(job, optimizer=v), machine), None],
            "--batch": lambda v: [(replace(job, batch_size=int(v) + k), machine) for k in (0, 1)],
            "--max-rows": lambda v: [(capped(job, int(int(v) * k)), machine) for k in (1, 1.2)],
        }[option](value)
        check(make_plan(*changed))
        if less is not None:
            with pytest.raises(DoesNotFit):
                make_plan(*less)


def capped(job: Job, rows: int) -> Job:
    return replace(job, tables=tuple(replace(table, rows=min(table.rows, rows)) for table in job.tables))


TABLE = st.builds(Table, st.just("t"), st.integers(1, 3_000_000) | st.integers(1, 30), st.integers(1, 20))
JOBS = st.builds(
    Job,
    st.lists(TABLE, min_size=1, max_size=7).map(tuple),
    st.sampled_from((1, 16, 128)),
    st.sampled_from(tuple(DTYPES)),
    st.sampled_from(OPTIMIZERS),
    st.integers(1, 4096),
    st.sampled_from((0.0, 0.15)),
)
MACHINES = st.builds(Machine, st.integers(1, 9), st.integers(20 << 20, 2 * GIB), st.integers(0, 2 * GIB))


@settings(max_examples=200)
@given(JOBS, MACHINES)
def test_any_tables_on_any_machine(job: Job, machine: Machine) -> None:
    everywhere = range(len(job.tables))
    room = job.usable(machine.hbm_bytes) - job.mlp_bytes - job.buffer_bytes(len(job.tables), machine.gpus)
    share = [-(-table.rows // machine.gpus) * job.row_bytes for table in job.tables]
    whole = [table.rows * job.row_bytes for table in job.tables]
    reads = [
        sum(job.tables[t].bag for t in host)
        for size in range(len(job.tables) + 1)
        for host in itertools.combinations(everywhere, size)
        if sum(whole[t] for t in host) <= job.usable(machine.host_bytes)
        and sum(share[t] for t in everywhere if t not in host) <= room
    ]
    try:
        plan = make_plan(job, machine)
    except DoesNotFit:
        assert not reads, "a plan exists"
        return
    check(plan)
    if reads:
        assert sum(job.tables[s.table].bag for s in plan.shards if s.kind == "host") <= min(reads)


@settings(max_examples=200)
@given(
    st.lists(
        st.builds(Table, st.just("t"), st.integers(1, 100).map(lambda n: n * 30_000), st.integers(1, 20)),
        min_size=2,
        max_size=8,
    ),
    st.floats(0.05, 0.95),
    st.floats(0.05, 1.0),
)
def test_the_host_is_read_as_little_as_can_be(tables: list[Table], on_gpu: float, on_host: float) -> None:
    job = Job(tuple(tables), dim=16, batch_size=1, reserve_frac=0.0)
    size = [table.rows * job.row_bytes for table in tables]
    room, host = int(on_gpu * sum(size)), int(on_host * sum(size))
    machine = Machine(1, room + job.mlp_bytes + job.buffer_bytes(len(tables), 1), host)
    choices = [
        (sum(tables[t].bag for t in chosen), sum(size[t] for t in chosen))
        for count in range(len(tables) + 1)
        for chosen in itertools.combinations(range(len(tables)), count)
        if sum(size[t] for t in chosen) <= host and sum(size) - sum(size[t] for t in chosen) <= room
    ]
    if not choices:
        with pytest.raises(DoesNotFit):
            make_plan(job, machine)
        return
    plan = make_plan(job, machine)
    check(plan)
    reads = sum(tables[shard.table].bag for shard in plan.shards if shard.kind == "host")
    assert (reads, plan.host_bytes) == min(choices), "the fewest reads, and of those the fewest bytes"


def test_what_is_read_most_stays_on_the_gpu() -> None:
    tables = (Table("often", 10_000_000, bag=100), Table("seldom", 10_000_000), Table("small", 1_000, bag=1))
    plan = make_plan(Job(tables), Machine(1, 8 * GIB, 64 * GIB))
    assert [plan.of_table(index)[0].kind for index in range(3)] == ["table-wise", "host", "table-wise"]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_traffic_is_what_the_messages_add_up_to(gpus: int) -> None:
    tables = tuple(
        Table(f"t{index}", rows, bag) for index, (rows, bag) in enumerate([(9_000_000, 3), (200, 1), (90, 4), (5, 1)])
    )
    job = Job(tables, dim=64, batch_size=32, optimizer="sgd", reserve_frac=0.0)
    machine = Machine(gpus, 3 * GIB if gpus == 1 else 5 * GIB // 2 // gpus + (200 << 20), 0)
    plan = make_plan(job, machine)
    assert kinds(plan)["row-wise"] == (gpus > 1)
    vector, sent = 4 * job.dim, [0] * gpus
    for sample in range(job.batch_size):
        home = sample % gpus
        for index, table in enumerate(tables):
            shards = plan.of_table(index)
            # Ids are few against vectors; they go to the GPUs evenly.
            sent[home] += round(8 * table.bag * (gpus - 1) / gpus)
            for shard in shards if len(shards) == gpus else shards[:1]:
                if shard.gpu != home:
                    sent[shard.gpu] += vector
                    sent[home] += vector
    for moved, counted in zip(plan.traffic, sent, strict=True):
        assert moved.embeddings == pytest.approx(counted, rel=0.02)
        assert moved.mlps == pytest.approx(2 * 4 * job.mlp_weights * (gpus - 1) / gpus)


def test_mlps_are_those_of_the_model() -> None:
    torch = pytest.importorskip("torch")
    from dlrm_examples.models.dlrm_torch import DLRM

    job = Job((Table("a", 1), Table("b", 1)), dim=8)
    sizes = DLRMConfig((1, 1), 8, bottom=(512, 256, 8), top=(1024, 1024, 512, 256, 1))
    model = DLRM(sizes, torch.Generator())
    assert job.mlp_weights == sum(p.numel() for p in model.parameters()) - model.embeddings.weight.numel()


def test_lists_have_their_published_sums() -> None:
    sums = {name: sum(rows) for name, rows in TABLES.items()}
    assert sums == {
        "criteo-kaggle": 33_762_577,
        "criteo-1tb-10m": 49_126_297,
        "criteo-1tb-40m-v1": 187_767_399,
        PAPER: 204_184_588,
        FULL: 882_774_559,
    }
    assert {len(rows) for rows in TABLES.values()} == {len(MLPERF_BAGS)} == {26}
