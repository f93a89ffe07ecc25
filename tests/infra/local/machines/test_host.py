"""What the embedded cloud uses of its host."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UsageError
from infra.local.machines.host import (
    CA_BUNDLE,
    CANDIDATE_RANGES,
    check_pip_sources,
    check_prerequisites,
    choose_cpus,
    choose_range,
    local_sources,
    merge_pip_config,
    node_mounts,
    pip_config_files,
    used_ranges,
)

# Prerequisites


@pytest.mark.parametrize(
    ("replaced", "message", "hint"),
    [
        ({"platform.system": "Darwin"}, "needs Linux", "--cloud aws"),
        ({"os.geteuid": 1000}, "needs root", "sudo"),
        ({"_has_program": {"iptables": False}}, "needs iptables\n", "apt-get install"),
        (
            {"_has_program": {"podman": False, "/usr/lib/podman/netavark": False}},
            "needs netavark, podman\n",
            "mmdebstrap",
        ),
        (
            {"importlib.util.find_spec": {"moto": None}},
            "needs moto",
            "install '.[local]'; with pipx:",
        ),
    ],
)
def test_a_missing_prerequisite_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, replaced: dict[str, Any], message: str, hint: str
) -> None:
    every = {"platform.system": "Linux", "os.geteuid": 0, "_has_program": {}, **replaced}
    for name, found in every.items():
        monkeypatch.setattr(
            f"infra.local.machines.host.{name}",
            lambda *names, found=found: found.get(*names, True) if names else found,
        )
    with pytest.raises(UsageError) as refused:
        check_prerequisites()
    assert message in f"{refused.value.message}\n"
    assert hint in str(refused.value.hint)


# Addresses


def networks(*texts: str) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(text) for text in texts]


def test_a_range_overlaps_nothing_that_is_used() -> None:
    for used, chosen in (
        ((), "172.31.0.0/16"),
        (("172.31.5.0/24",), "172.30.0.0/16"),
        (("172.31.0.2/32", "172.30.0.0/15"), "172.29.0.0/16"),
        (("172.16.0.0/12",), "10.200.0.0/16"),
    ):
        assert str(choose_range(networks(*used))) == chosen
    with pytest.raises(UsageError, match="no free private address range"):
        choose_range(CANDIDATE_RANGES)


def test_routes_addresses_and_name_servers_are_used_ranges(tmp_path: Path) -> None:
    routes = ["default", "0.0.0.0/1", "172.31.0.0/16", "10.0.0.0/8", "192.0.2.2"]
    resolv_conf = tmp_path / "resolv.conf"
    resolv_conf.write_text("search x\nnameserver 172.30.0.2\nnameserver fd00::1\n")
    used = used_ranges(lambda _: json.dumps([{"dst": r} for r in routes]), resolv_conf)
    assert used == networks("172.31.0.0/16", "10.0.0.0/8", "192.0.2.2/32", "172.30.0.2/32")


# CPUs


def test_nodes_share_cpus_as_little_as_possible() -> None:
    assert choose_cpus(3, [], range(2)) == [(0,), (1,), (0,)]
    assert choose_cpus(2, [(0,)], range(2)) == [(1,), (0,)]
    assert choose_cpus(2, [], range(8)) == [(0, 1), (2, 3)]
    assert choose_cpus(1, [(0, 1), (2, 3)], range(8)) == [(4, 5)]
    assert choose_cpus(1, [], (5,)) == [(5,)]


# pip


def merged(files: list[Path], environment: dict[str, str]) -> dict[str, dict[str, str]]:
    config = merge_pip_config(files, environment)
    return {section: dict(config[section]) for section in config.sections()}


def test_pip_files_are_merged_in_pips_order(tmp_path: Path) -> None:
    weak, strong = tmp_path / "weak.conf", tmp_path / "strong.conf"
    weak.write_text("[global]\nindex-url = https://weak/simple\ncache-dir = /c\ntimeout = 5\n")
    strong.write_text(
        "[global]\nindex_url = https://strong/simple\n[install]\nfind-links =\n  /a\n  /b\n"
    )
    assert merged([weak, strong, tmp_path / "absent"], {}) == {
        "global": {"index-url": "https://strong/simple", "timeout": "5"},
        "install": {"find-links": "\n/a\n/b"},
    }


def test_variables_beat_every_file_and_section(tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nno-index = true\n[install]\nfind-links = /a\n")
    environment = {"PIP_FIND_LINKS": "/x /y", "PIP_TARGET": "/t", "PIP_NO_INDEX": "", "PATH": "/"}
    settings = {"global": {"no-index": "true", "find-links": "/x /y"}, "install": {}}
    assert merged([file], environment) == settings
    files = pip_config_files({"XDG_CONFIG_HOME": "/x", "PIP_CONFIG_FILE": "/last"}, tmp_path)
    assert files[-2:] == [Path("/x/pip/pip.conf"), Path("/last")]
    assert pip_config_files({"PIP_CONFIG_FILE": "/dev/null"}, tmp_path) == []
    file.write_text("no section\n")
    with pytest.raises(UsageError, match=r"pip\.conf can't be read"):
        merge_pip_config([file], {})


def test_folders_of_packages_are_found(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "index"
    (index / "simple").mkdir(parents=True)
    wheels.mkdir()
    environment = {
        "PIP_FIND_LINKS": f"{wheels} https://example.org/links {tmp_path}/absent",
        "PIP_EXTRA_INDEX_URL": f"file://{index}/simple https://example.org/simple",
    }
    # An index's pages link to files beside it, so the folder above is what is needed.
    assert local_sources(merge_pip_config([], environment)) == [index, wheels]


@pytest.mark.parametrize("by_file", [False, True])
def test_a_private_folder_of_packages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    wheels, file = tmp_path / "my wheels", tmp_path / "pip.conf"
    wheels.mkdir()
    link = tmp_path / "link"
    link.symlink_to(wheels)
    file.write_text(f"[install]\nfind-links = {link}\n")
    found = {"PIP_CONFIG_FILE": str(file)} if by_file else {"PIP_FIND_LINKS": str(link)}
    environment = {"PIP_CONFIG_FILE": "/dev/null", **found}
    check_pip_sources(environment)
    for mode in (0o700, 0o711, 0o754):
        wheels.chmod(mode)
        with pytest.raises(UsageError, match=f"pip's source {wheels} .* is private") as refused:
            check_pip_sources(environment)
        assert f"chmod -R o+rX '{wheels}'" in (refused.value.hint or "")
    # On the nodes, /root is private, even if it is not on this machine.
    wheels.chmod(0o755)
    monkeypatch.setattr("infra.local.machines.host._ROOT_HOME", tmp_path)
    with pytest.raises(UsageError, match="is private") as refused:
        check_pip_sources(environment)
    assert (refused.value.hint or "").startswith("move it to /srv")


def test_nodes_see_the_machines_trust_and_pip_sources(tmp_path: Path) -> None:
    bundle, wheels = tmp_path / "bundle.pem", tmp_path / "wheels"
    bundle.write_text("certificates")
    wheels.mkdir()
    environment = {
        "PIP_CONFIG_FILE": "/dev/null",
        "REQUESTS_CA_BUNDLE": f"{bundle}.absent",
        "SSL_CERT_FILE": str(bundle),
        "PIP_FIND_LINKS": str(wheels),
    }
    mounts = node_mounts(tmp_path / "node.conf", environment)
    assert {m.target: m.source for m in mounts} == {
        "/etc/pip.conf": tmp_path / "node.conf",
        CA_BUNDLE: bundle,
        str(wheels): wheels,
    }
    text = (tmp_path / "node.conf").read_text()
    assert text == f"[global]\nfind-links = {wheels}\ncert = {CA_BUNDLE}\n\n"
