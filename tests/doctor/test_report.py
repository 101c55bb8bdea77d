"""Few lines, however many ranks."""

from typing import Any

import pytest

from hvd_ddp.doctor.check import Check
from hvd_ddp.doctor.nodes import nodes
from hvd_ddp.doctor.report import Report, lines, ranks_in_words, show, summary, worst
from hvd_ddp.doctor.together import versions

HOSTS = [f"node{rank // 8:03d}" for rank in range(1000)]


def test_a_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("torch", "ok", "2.14.1", rank=rank) for rank in range(1000)]
    checks += [Check("host", "ok", f"{HOSTS[rank]} is 10.0.0.{rank}", rank=rank) for rank in range(0, 1000, 8)]
    checks += [Check("/dev/shm", "warning", f"{rank} MiB", "Enlarge it.", rank) for rank in range(0, 1000, 8)]
    checks += [Check("horovod", "failure", "built for another", "Build it.", rank) for rank in (*range(16, 24), 999)]
    checks += [Check("clocks", "failure", f"node{rank} is off", "Set it.", rank) for rank in range(500)]
    shown = lines(checks, HOSTS)
    assert len(shown) == 1 + 2 + 4 + 1 + 8
    assert (shown[0].ranks, shown[1].ranks) == ("all ranks", "rank 0 on node000")
    assert shown[2].detail == "node001 is 10.0.0.8 (and 123 more like this)"
    (horovod,) = [line for line in shown if line.name == "horovod"]
    assert horovod.ranks == "ranks 16-23,999 on node002, node124"
    show(checks, HOSTS, plain=True)
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 50 and "\x1b" not in out and max(map(len, out.splitlines())) <= 120
    assert out.count("-> Build it.") == 1
    assert summary(checks, HOSTS) == "3 ok, 4 warnings, 9 failures"
    assert worst(checks) == "failure" and worst([]) == "ok"


def test_every_rank_says_something_else() -> None:
    checks = [Check("horovod", "failure", f"error at {rank:x}", "Build it.", rank) for rank in range(1000)]
    shown = lines(checks, HOSTS)
    assert len(shown) == 8 and shown[-1].detail == "error at 7 (and 992 more like this)"


def test_one_rank_needs_no_numbers() -> None:
    assert [line.ranks for line in lines([Check("a", "ok", "b", rank=0)], ["here"])] == [""]
    assert [line.ranks for line in lines([Check("a", "ok", "b", rank=1)], ["here", "here"])] == ["rank 1"]
    assert (ranks_in_words([4]), ranks_in_words([0, 1, 2, 5])) == ("rank 4", "ranks 0-2,5")


def test_versions_that_differ() -> None:
    reports = {rank: Report([], {"torch": "2.14.1", "Python": "3.11"}, {}) for rank in range(100)}
    assert [check.status for check in versions(reports)] == ["ok"]
    reports[7] = Report([], {"torch": "2.13.0", "Python": "3.11"}, {})
    reports[8] = Report([], {"Python": "3.11"}, {})
    (check,) = versions(reports)
    assert (check.status, check.rank) == ("failure", 7)
    assert check.detail == "torch differs: 2.14.1 on ranks 0-6,9-99, 2.13.0 on rank 7", "rank 8 could not tell"


class Two:
    """Two ranks of one host have come."""

    hosts = {"node1": [0, 1]}  # noqa: RUF012


ALL_CORES = "2 rank(s) of node1 may start 8 threads each on 8 core(s)"


@pytest.mark.parametrize(
    ("facts", "name", "wanted"),
    [
        ([{"cores": [0]}, {"cores": [0]}], "binding", "2 ranks of node1 have 1 core(s)"),
        ([{"cores": [0]}, {"cores": [1]}], "binding", "a rank is bound to 1 core(s), where 2 rank(s) could use 4 each"),
        ([{"OMP_NUM_THREADS": ""}] * 2, "threads", f"OMP_NUM_THREADS is unset: {ALL_CORES}"),
        ([{"OMP_NUM_THREADS": "8"}] * 2, "threads", f"OMP_NUM_THREADS is 8: {ALL_CORES}"),
        ([{"OMP_NUM_THREADS": "2,1"}] * 2, "threads", f"OMP_NUM_THREADS is 2,1: {ALL_CORES}"),
        ([{"shm": 64 << 20}] * 2, "/dev/shm", "64 MiB free for 2 rank(s) of node1"),
        ([{"gpus": 1}, {"gpus": 1}], "", ""),
        ([{"gpus": 8}, {"gpus": 8}], "", ""),
        ([{}, {}], "", ""),
    ],
)
def test_what_ranks_of_a_host_share(facts: list[dict[str, Any]], name: str, wanted: str) -> None:
    good = {"cores": list(range(8)), "cores_of_node": 8, "OMP_NUM_THREADS": "4", "shm": 1 << 30}
    reports = {rank: Report([], {}, good | mine) for rank, mine in enumerate(facts)}
    checks = [check for check in nodes(Two(), reports) if check.status != "ok"]  # type: ignore[arg-type]
    assert [check.name for check in checks] == ([name] if name else [])
    assert all(wanted in check.detail and check.remedy and check.rank == 0 for check in checks)


def test_more_ranks_than_gpus() -> None:
    class Three:
        hosts = {"node1": [0, 1, 2]}  # noqa: RUF012

    facts = {"cores": [0, 1, 2], "cores_of_node": 3, "OMP_NUM_THREADS": "1", "gpus": 2}
    reports = {rank: Report([], {}, facts) for rank in range(3)}
    failures = [check for check in nodes(Three(), reports) if check.status == "failure"]  # type: ignore[arg-type]
    assert [check.detail for check in failures] == ["3 ranks of node1 see 2 GPUs: two would share one"]
