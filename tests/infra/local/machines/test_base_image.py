"""The base image: recipe, sources, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.errors import CloudError, UsageError
from infra.local.machines import base_image
from infra.local.machines.base_image import (
    BASES,
    apt_sources,
    ensure_base_image,
    read_os_release,
    recipe,
    recipe_hash,
)
from infra.local.machines.podman import Podman
from infra.wait import Silent

UBUNTU = "docker.io/library/ubuntu:24.04"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class BuildPodman(Podman):
    """Records the calls of a build; images exist once they are built."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.existing: set[str] = set()
        self.archive = b""
        self.refuse = ""

    def call(self, *arguments: str, timeout_s: float = 0, stdin: Any = None) -> str:
        self.calls.append(arguments)
        if arguments[0] == self.refuse:
            raise CloudError(f"podman {arguments[0]}: refused")
        if arguments[0] == "import":
            self.archive = stdin.read()
            self.existing.add(arguments[-1])
        if arguments[0] == "pull":
            self.existing.add(arguments[-1])
        if arguments[0] == "build":
            self.existing |= {a.partition("=")[2] for a in arguments if a.startswith("--tag=")}
        return "what it is\n" if arguments[:2] == ("image", "inspect") else ""

    def images(self, reference: str) -> list[str]:
        return [name for name in self.existing if name == reference]

    def remove_image(self, image: str) -> None:
        self.existing.discard(image)

    def verbs(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch) -> BuildPodman:
    monkeypatch.setattr(base_image, "is_registry_reachable", lambda: False)
    monkeypatch.setattr(base_image, "apt_sources", lambda *_: ["deb http://mirror x main"])
    monkeypatch.setattr(base_image, "bootstrap_command", lambda *_: ["echo", "archive"])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    release = {"ID": "debian", "NAME": "Debian GNU/Linux", "VERSION_ID": "12"}
    release["VERSION_CODENAME"] = "bookworm"
    monkeypatch.setattr(base_image, "read_os_release", lambda: release)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return BuildPodman()


def test_every_recipe_change_changes_the_image_name() -> None:
    files = recipe()
    original = recipe_hash(files)
    assert recipe_hash(dict(reversed(files.items()))) == original
    for name in files:
        assert recipe_hash({**files, name: files[name] + "#"}) != original
    for base in BASES:
        assert BASES[base].packages in recipe(base)["configure.sh"]
        assert "@PACKAGES@" not in "".join(recipe(base).values())


def test_the_image_is_built_once_with_a_description(podman: BuildPodman) -> None:
    image = ensure_base_image(podman, Silent())
    assert podman.archive == b"archive\n"
    assert podman.verbs() == ["import", "build", "image"]
    assert podman.existing == {image.reference}
    label = next(a for a in podman.calls[1] if a.startswith("--label="))
    assert label.endswith("=embedded base, Debian 12 in place of Ubuntu 24.04")
    assert image.description == "what it is"
    assert image.ami_id == f"ami-0{recipe_hash(recipe())}"

    assert ensure_base_image(podman, Silent()) == image
    assert podman.verbs().count("build") == 1


def test_a_debian_machine_has_the_packages_of_debian_13(
    podman: BuildPodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], str, str]] = []
    monkeypatch.setattr(
        base_image, "apt_sources", lambda *_: ["deb http://m bookworm-updates main"]
    )

    def command(*arguments: Any) -> list[str]:
        asked.append(arguments)
        return ["echo", "archive"]

    monkeypatch.setattr(base_image, "bootstrap_command", command)
    image = ensure_base_image(podman, Silent(), "debian13")

    assert image.ami_id == f"ami-0{recipe_hash(recipe('debian13'))}"
    assert image.ami_id != ensure_base_image(podman, Silent()).ami_id
    sources, codename, packages = asked[1]
    assert (sources, codename) == (["deb http://m trixie-updates main"], "trixie")
    assert {"slurm-wlm", "libpam-systemd", "unattended-upgrades"} <= set(packages.split())
    assert "--label=org.spr-cluster.description=embedded base, Debian 13" in podman.calls[1]


@pytest.mark.parametrize("had", [True, False])
def test_ubuntu_is_pulled_if_a_registry_answers(
    podman: BuildPodman, monkeypatch: pytest.MonkeyPatch, had: bool
) -> None:
    monkeypatch.setattr(base_image, "is_registry_reachable", lambda: True)
    if had:
        podman.existing.add(UBUNTU)
    image = ensure_base_image(podman, Silent())
    assert podman.verbs() == ["pull", "build", "image"]
    assert "--label=org.spr-cluster.description=embedded base, Ubuntu 24.04" in podman.calls[1]
    # A base that was pulled for the build is removed.
    assert podman.existing == ({image.reference, UBUNTU} if had else {image.reference})
    podman.refuse = "pull"
    podman.existing.clear()
    ensure_base_image(podman, Silent())
    assert podman.verbs()[3:] == ["pull", "import", "build", "image"]


@pytest.mark.parametrize(
    ("command", "refused", "message"),
    [
        ("echo 'E: no mirror' >&2; exit 25", "", "could not create the base image: E: no mirror"),
        ("sleep 60", "import", "podman import: refused"),
        ("echo archive", "build", "podman build: refused"),
    ],
)
def test_a_failure_is_reported_and_leaves_no_partial_image(
    podman: BuildPodman,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    refused: str,
    message: str,
) -> None:
    monkeypatch.setattr(base_image, "bootstrap_command", lambda *_: ["sh", "-c", command])
    monkeypatch.setattr(base_image, "_SETTLE_S", 0.2)
    podman.refuse = refused
    with pytest.raises(CloudError, match=message):
        ensure_base_image(podman, Silent())
    assert podman.existing == set()


@pytest.mark.parametrize(
    ("base", "release", "offered", "needed"),
    [
        ("ubuntu", {"ID": "fedora"}, "Ubuntu 24.04", "Debian or Ubuntu"),
        ("ubuntu", {}, "Ubuntu 24.04", "Debian or Ubuntu"),
        ("debian13", {"ID": "ubuntu"}, "Debian 13", "Debian"),
    ],
)
def test_a_machine_without_a_package_mirror_is_refused(
    podman: BuildPodman,
    monkeypatch: pytest.MonkeyPatch,
    base: str,
    release: dict[str, str],
    offered: str,
    needed: str,
) -> None:
    monkeypatch.setattr(base_image, "read_os_release", lambda: release)
    words = f"no container registry offers {offered}, .*is not an x86-64 {needed} with a"
    with pytest.raises(UsageError, match=words):
        ensure_base_image(podman, Silent(), base)


def test_apt_sources_of_both_kinds_without_third_parties(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# a comment\n"
        "deb http://mirror/debian bookworm main contrib\n"
        "deb-src http://mirror/debian bookworm main\n"
        "deb http://mirror/debian trixie main\n"
        "deb [arch=amd64 signed-by=/etc/apt/keyrings/docker.gpg] https://docker bookworm main\n"
    )
    (tmp_path / "sources.list.d" / "debian.sources").write_text(
        "Types: deb deb-src\n"
        "# a remark in the middle\n"
        "URIs: http://deb.debian.org/debian\n"
        "Suites: bookworm\n bookworm-updates bookworm-backports\n"
        "Components: main\n"
        f"Signed-By: {KEYRING}\n"
        "\n"
        "Types: deb\nURIs: http://off\nSuites: bookworm\nComponents: main\nEnabled: no\n"
        "\n"
        "Types: deb\nURIs: https://node\nSuites: nodistro\nComponents: main\n"
    )
    assert apt_sources(tmp_path, "bookworm") == [
        "deb http://mirror/debian bookworm main contrib",
        f"deb [signed-by={KEYRING}] http://deb.debian.org/debian bookworm main",
        f"deb [signed-by={KEYRING}] http://deb.debian.org/debian bookworm-updates main",
    ]


def test_os_release_is_read_without_its_quotes(tmp_path: Path) -> None:
    file = tmp_path / "os-release"
    file.write_text('NAME="Debian GNU/Linux"\nID=debian\n\n')
    assert read_os_release(file) == {"NAME": "Debian GNU/Linux", "ID": "debian"}
