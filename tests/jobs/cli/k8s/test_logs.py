"""`logs` and `k8s submit` of a job that runs: its log, also over broken connections."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jobs.launchers.kubernetes import api, pod_log
from jobs.worker.runtime.events import mark_of, render_event
from tests.jobs.cli.k8s.test_submit import SUBMIT
from tests.jobs.launchers.kubernetes.scenes import JOB, TRAIN_JOB, K8s, ended, job
from tests.jobs.launchers.kubernetes.server import KubernetesServer


def event(kind: str, **fields: Any) -> str:
    return render_event({"event": kind, **fields, "at": 1.0}, mark_of("bert"))


def stamped(texts: list[str], per_second: int = 3) -> list[str]:
    """Return the lines as kubelet stamps them: several have one second, some one nanosecond."""
    times = (divmod(number, per_second) for number in range(len(texts)))
    stamps = [
        f"2026-11-22T14:{second // 60:02d}:{second % 60:02d}.{part // 2:09d}Z"
        for second, part in times
    ]
    return [f"{stamp} {text}" for stamp, text in zip(stamps, texts, strict=True)]


def finished(
    server: KubernetesServer,
    lines: list[str],
    code: int = 0,
    second: Sequence[str] = ("second node",),
) -> None:
    """Keep a job that has ended, with the log of its first pod."""
    job(server, "Failed" if code else "Succeeded")
    phase = "Failed" if code else "Succeeded"
    server.logs[server.pod("bert", 0, phase, **ended(code, "Error" if code else "Completed"))] = (
        lines
    )
    server.logs[server.pod("bert", 1, phase)] = stamped(list(second))


def test_logs_prints_events_as_text_and_the_pod_of_a_rank(
    k8s: K8s, server: KubernetesServer
) -> None:
    finished(
        server,
        stamped(["before", event("note", text="one note"), event("phase", name="load"), "after"]),
    )

    assert k8s("logs", "bert").out == "before\none note\nafter\n"
    assert k8s("logs", "bert", "--rank", "1").out == "second node\n"
    refused = k8s("logs", "bert", "--rank", "2")
    assert refused.code == 2
    assert "--rank 2: job bert has 2 ranks, from 0" in refused.err


def test_a_rank_that_has_printed_nothing_is_mentioned(k8s: K8s, server: KubernetesServer) -> None:
    finished(server, stamped(["before"]), second=())
    result = k8s("logs", "bert", "--rank", "1")
    assert (result.code, result.out) == (0, "")
    assert "rank 1 has printed nothing (in training, only rank 0 prints progress)" in result.err


@pytest.mark.parametrize("is_kept", [True, False])
def test_after_a_restart_the_run_before_is_shown_first(
    k8s: K8s, server: KubernetesServer, is_kept: bool
) -> None:
    job(server)
    restarted = {"name": "pytorch", "restartCount": 2, "lastState": {"terminated": {"exitCode": 1}}}
    states = [{**restarted, "state": {"running": {}}}]
    pod = server.pod("bert", 0, "Running", containerStatuses=states)
    server.logs[pod] = stamped(["again"])
    if is_kept:
        server.previous[pod] = stamped(["ValueError: x"])
    result = k8s("logs", "bert")

    assert (result.code, result.out) == (0, "ValueError: x\nagain\n" if is_kept else "again\n")
    assert result.err.splitlines() == [
        "pod bert-master-0 has restarted 2 times: the log of its run before, then of this one"
    ]


def test_a_container_that_waits_to_restart_shows_its_last_run_once(
    k8s: K8s, server: KubernetesServer
) -> None:
    job(server)
    last = {"name": "pytorch", "restartCount": 1, "lastState": {"terminated": {"exitCode": 1}}}
    states = [{**last, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
    pod = server.pod("bert", 0, "Running", containerStatuses=states)
    # kubelet has it under both names then.
    server.logs[pod] = server.previous[pod] = stamped(["ValueError: x"])
    result = k8s("logs", "bert")

    assert (result.code, result.out) == (0, "ValueError: x\n")
    assert "has restarted 1 time and waits to start again: the log of its last run" in result.err


def test_a_log_that_breaks_off_goes_on_without_lost_or_doubled_lines(
    k8s: K8s, server: KubernetesServer
) -> None:
    choice = random.Random(3)
    # The same text again and again, in lines that no stamp tells apart.
    texts = [choice.choice(["same", "like it", f"line {number}"]) for number in range(200)]
    finished(server, stamped(texts))
    server.breaks = [choice.randrange(3, 30) for _ in range(40)]
    result = k8s("logs", "-f", "bert")

    assert result.code == 0, result.err
    assert result.out.splitlines() == texts
    assert sum(kind == "LOG" for kind, _ in server.requests) > 10


def test_lines_that_are_stamped_out_of_order_are_kept(k8s: K8s, server: KubernetesServer) -> None:
    seconds = [5, 4, 5, 6, 5, 6, 7, 6, 7]
    lines = [f"2026-11-22T14:25:0{second}.1Z {n}" for n, second in enumerate(seconds)]
    finished(server, lines)
    server.breaks = [2, 3, 3, 4, 3]
    result = k8s("logs", "-f", "bert")

    assert result.out.split() == [str(n) for n in range(len(seconds))]


def test_a_log_that_never_comes_back_is_given_up(k8s: K8s, server: KubernetesServer) -> None:
    finished(server, stamped(["first"]))
    server.breaks = [0] * 1000
    result = k8s("logs", "-f", "bert")

    assert (result.code, result.out) == (1, "")
    assert "spr-cluster: the stream broke off" in result.err
    assert sum(kind == "LOG" for kind, _ in server.requests) == pod_log._TRIES + 1


def test_logs_follows_a_running_job_to_its_end(k8s: K8s, server: KubernetesServer) -> None:
    job(server)
    pod = server.pod("bert", 0, "Running")
    texts = [f"step {number}" for number in range(12)]
    server.logs[pod] = []
    server.breaks = [3, 5]

    def train() -> None:
        for line in stamped(texts):
            server.logs[pod].append(line)
            time.sleep(0.01)
        server.objects[pod]["status"]["phase"] = "Succeeded"
        job(server, "Succeeded")

    result = beside(train, lambda: k8s("logs", "-f", "bert"))
    assert result.out.splitlines() == texts


def test_a_job_that_is_deleted_while_it_is_followed_has_failed(
    k8s: K8s, server: KubernetesServer
) -> None:
    job(server)
    pod = server.pod("bert", 0, "Running")
    server.logs[pod] = stamped(["first"])

    def delete() -> None:
        wait_for(lambda: ("LOG", f"{pod}?") in server.requests)
        del server.objects[JOB]
        del server.objects[pod]

    server.short = 1
    result = beside(delete, lambda: k8s("logs", "-f", "bert"))
    assert (result.code, result.out) == (1, "first\n")
    assert "spr-cluster: job bert was deleted before it ended" in result.err
    assert "goes on without" not in result.err


def test_a_container_that_starts_again_is_waited_for(k8s: K8s, server: KubernetesServer) -> None:
    job(server)
    pod = server.pod("bert", 0, "Running")
    server.logs[pod] = stamped(["first"])
    server.short = 3 * pod_log._TRIES

    def start_again() -> None:
        wait_for(lambda: not server.short)
        server.logs[pod] += stamped(["first", "again"])[1:]
        server.objects[pod]["status"]["phase"] = "Succeeded"
        job(server, "Succeeded")

    result = beside(start_again, lambda: k8s("logs", "-f", "bert"))
    assert (result.code, result.out) == (0, "first\nagain\n"), result.err


def test_a_silent_log_is_no_failure(
    k8s: K8s, server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(server)
    pod = server.pod("bert", 0, "Running")
    server.logs[pod] = stamped(["first"])
    monkeypatch.setattr(api, "_TIMEOUT_S", (1.0, 0.05))
    monkeypatch.setattr(pod_log, "_LASTS_S", 0.04)

    def train() -> None:
        wait_for(lambda: sum(kind == "LOG" for kind, _ in server.requests) > pod_log._TRIES + 2)
        server.logs[pod] += stamped(["first", "last"])[1:]
        server.objects[pod]["status"]["phase"] = "Succeeded"
        job(server, "Succeeded")

    result = beside(train, lambda: k8s("logs", "-f", "bert"))
    assert (result.code, result.out) == (0, "first\nlast\n"), result.err


def beside(work: Callable[[], None], do: Callable[[], Any]) -> Any:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        return do()
    finally:
        thread.join(timeout=10)


def test_a_replaced_pod_is_followed_too(k8s: K8s, server: KubernetesServer) -> None:
    job(server)
    pod = server.pod("bert", 0, "Failed", reason="Evicted", message="disk pressure")
    server.logs[pod] = stamped(["of the first pod"])

    def replace() -> None:
        wait_for(lambda: ("LOG", f"{pod}?") in server.requests)
        server.pod("bert", 0, "Running")
        server.objects[pod]["metadata"]["uid"] = "another"
        server.logs[pod] = stamped(["of the second pod"])
        wait_for(lambda: server.requests.count(("LOG", f"{pod}?")) > 1)
        server.objects[pod]["status"]["phase"] = "Succeeded"
        job(server, "Succeeded")

    result = beside(replace, lambda: k8s("logs", "-f", "bert"))
    assert result.out.splitlines() == ["of the first pod", "of the second pod"]


def wait_for(is_true: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true within 5 s")


def test_ctrl_c_leaves_the_job_running_and_says_so(
    k8s: K8s, server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(server)
    server.logs[server.pod("bert", 0, "Running")] = stamped(["first"])
    monkeypatch.setattr("jobs.__main__._exit_at_once", exit_with)

    def interrupt() -> None:
        wait_for(lambda: any(kind == "LOG" for kind, _ in server.requests))
        os.kill(os.getpid(), signal.SIGINT)

    result = beside(interrupt, lambda: k8s("attach", "bert"))
    assert result.code == 130
    assert "job bert continues without this command" in result.err
    assert "to end it:    spr-cluster cancel bert --namespace ml" in result.err
    assert JOB in server.objects


def exit_with(code: int) -> None:
    raise SystemExit(code)


RESULT = {
    "f1": 81.25,
    "em": 70.5,
    "eval_records": 100,
    "world_size": 2,
    "backend": "gloo",
    "dtype": "bf16",
    "samples_per_second": 12.5,
    "tokens_per_second": 4800.0,
    "seconds": {"train": 33.0},
    "ranks": [{"hostname": "bert-node-0-0"}, {"hostname": "bert-node-0-1"}],
}


def operator(server: KubernetesServer, phase: str, lines: list[str], **state: Any) -> None:
    """Once a job is created, let its pods end at once."""
    condition = {"type": "Complete" if phase == "Succeeded" else "Failed", "status": "True"}

    def act(path: str, found: dict[str, Any]) -> None:
        if path == TRAIN_JOB:
            pod = server.pod("bert", 0, phase, kind="TrainJob", **state)
            server.logs[pod] = lines
            server.objects[path]["status"] = {"conditions": [condition]}

    server.on_create = act


def test_submit_shows_what_bare_metal_shows(k8s: K8s, server: KubernetesServer) -> None:
    start = event("start", world_size=2, hosts=["a", "b"], backend="gloo", dtype="bf16")
    operator(server, "Succeeded", stamped([start, "plain text", event("result", **RESULT)]))
    result = k8s(*SUBMIT)

    assert result.code == 0, result.err
    assert "2 ranks on a, b; backend gloo, bf16\nplain text\n" in result.err
    assert result.out.splitlines() == [
        "F1 81.2, exact match 70.5 on 100 records",
        "world size 2 on 2 hosts, backend gloo, bf16",
        "12.5 samples/s, 4,800 tokens/s, 33.0 s of training",
        "model, predictions, and results.json: /workspace/jobs/bert/output/",
        "to fetch them: spr-cluster fetch bert",
    ]


@pytest.mark.parametrize(
    ("lines", "state", "message"),
    [
        (
            [
                event(
                    "error",
                    message="loss is nan",
                    hint="lower --learning-rate",
                    rank=1,
                    host="b",
                    lost_peer=False,
                )
            ],
            ended(1),
            "loss is nan",
        ),
        ([], ended(137, "OOMKilled"), "was killed on node worker0: its memory ran out"),
        (
            [],
            {"reason": "Evicted", "message": "low on memory"},
            "was evicted from node worker0: low on memory",
        ),
        (["Traceback", "ValueError: x"], ended(1), "ended with exit code 1"),
    ],
    ids=["rank", "memory", "evicted", "exit code"],
)
def test_a_failure_names_its_cause(
    k8s: K8s, server: KubernetesServer, lines: list[str], state: dict[str, Any], message: str
) -> None:
    operator(server, "Failed", stamped(lines), **state)
    result = k8s(*SUBMIT)

    assert (result.code, result.out) == (1, "")
    last = result.err[result.err.index("spr-cluster: ") :]
    assert message in last
    assert "the whole log: spr-cluster logs bert" in " ".join(last.split())
