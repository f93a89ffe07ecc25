"""``types`` and the line of ``up`` about a cheaper type, on a cloud called AWS."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.harness.command_line import CommandLine


def test_types_are_compared_at_todays_prices_of_the_region(line: CommandLine) -> None:
    told = line.must("types", "c7i.24xlarge", "r7iz.metal-16xl", "--region", "eu-west-1", "--json")
    found = json.loads(told.out)
    first, second = found["types"]

    assert (first["type"], second["type"]) == ("c7i.24xlarge", "r7iz.metal-16xl")
    assert first["usd_per_hour"] == pytest.approx(4.284 * 1.12)
    assert first["prices_as_of"].startswith("Price List API, 20")
    # The cheapest zone is the last one.
    assert 0 < first["spot_usd_per_hour"] < 0.4 * first["usd_per_hour"]
    assert second["usd_per_pflops_hour"] == pytest.approx(6.5472 * 1.12 / 0.12779, abs=0.01)
    assert found["price_problem"] is None


def test_all_types_fit_on_a_screen_and_no_resource_is_made(line: CommandLine) -> None:
    told = line.must("types", "--region", "us-east-1").out.splitlines()

    assert len(told) < 32
    assert told[0].startswith("TYPE")
    assert told[1].startswith("c8i-flex.16xlarge (throttled)")
    assert any("dearer types: --all" in each for each in told)
    assert not [call for call in line.call_log.calls if "Create" in call.action]


def test_without_credentials_the_table_answers(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.types.has_credentials", lambda _: False)
    told = line.must("types", "c7i", "--region", "eu-west-1").out

    assert "unknown in eu-west-1 (no AWS credentials found)" in told
    assert not line.call_log.calls


def test_up_names_a_type_on_which_the_same_work_costs_a_third_less(line: CommandLine) -> None:
    text = line.must("up", "--nodes", "2", "--dry-run").out

    assert (
        "On c8i.16xlarge, the same work costs 54 % less by list prices and AMX peaks, and boots in 3 min "
        "instead of 20: `spr-cluster types`."
    ) in text
    cheap = line.must("up", "--nodes", "2", "--dry-run", "--instance-type", "c7i.24xlarge").out
    assert "the same work" not in cheap


def test_a_finished_job_is_projected_to_other_types(line: CommandLine, tmp_path: Path) -> None:
    parts = {"boot and installation": 999.0, "computing": 1200.0, "waiting for ranks": 600.0}
    receipt = {"parts": {name: {"seconds": seconds} for name, seconds in parts.items()}}
    record = {"cloud": "aws", "nodes": [{"type": "r7iz.metal-16xl"}] * 2, "node_share": 0.25}
    (tmp_path / "job").mkdir()
    (tmp_path / "results.json").write_text(json.dumps({"receipt": receipt}))
    (tmp_path / "job/job.json").write_text(json.dumps(record))
    words = ("types", "c7i.24xlarge", "--region", "us-east-1", "--for", str(tmp_path))

    told = line.must(*words).out
    found = {each["type"]: each for each in json.loads(line.must(*words, "--json").out)["types"]}

    own, other = found["r7iz.metal-16xl"], found["c7i.24xlarge"]
    boot = own["boot_minutes"]
    assert (own["job_basis"], own["job_minutes"]) == ("measured", boot + 30)
    assert own["job_usd"] == pytest.approx(0.25 * 2 * 6.5472 * (boot + 30) / 60, abs=0.01)
    slower = own["amx_tflops"] / other["amx_tflops"]
    minutes = other["boot_minutes"] + 10 + 20 * slower
    assert (other["job_basis"], other["job_minutes"]) == ("projection", round(minutes, 1))
    assert re.search(r"r7iz.metal-16xl +\d+ min +\$[\d.]+ +measured", told)
    (tmp_path / "results.json").write_text("{}")
    refused = line.run(*words)
    assert refused.code == 2
    assert "expected the results of a training job on AWS, with a receipt" in refused.err
