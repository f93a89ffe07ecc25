"""Nodes with software where there is no image, images for next time, and who finds them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from cluster.local_files import ClusterFiles, cluster_names
from infra.ec2 import tags
from infra.ec2.images import Image
from infra.ec2.inventory import Inventory
from infra.errors import ConnectionLostError, HostError, SprError, UsageError
from tests.harness.command_line import CommandLine, CommandResult
from tests.harness.prepared_cluster import begin_with
from tests.harness.simulated_cloud import SimulatedCloud

INSTALL = "spr-cluster-install.sh"


def purchases(cloud: SimulatedCloud) -> int:
    return cloud.writes().count("RunInstances")


def test_without_an_image_all_nodes_are_bought_and_installed_at_once(cloud: SimulatedCloud) -> None:
    cloud.faults("image_s = 3000\n")
    cloud.up(nodes=3, bake="none")

    cluster = cloud.cluster()
    assert cluster.is_whole
    assert purchases(cloud) == 1
    assert cloud.steps.count(INSTALL) == 3
    assert len({node.instance.tags[tags.INSTALLED] for node in cluster.nodes}) == 1
    # For the next time; nobody waits for it.
    (image,) = cloud.found("images").images
    assert image.tags[tags.SEALED] == "yes"
    before = cloud.writes()
    cloud.up()
    assert cloud.writes() == before
    assert "from Canonical's Ubuntu image" in str(cloud.plan(nodes=4).actions), "it is not ready"
    cloud.clock.sleep(3600)
    cloud.up(nodes=4)
    assert cloud.cluster().is_whole
    assert cloud.steps.count(INSTALL) == 3


def test_an_installation_that_fails_on_one_node_is_done_again_there_alone(
    cloud: SimulatedCloud,
) -> None:
    numbers = itertools.count()

    def fail_the_second() -> None:
        if next(numbers) == 1:
            raise HostError("node1", "no space left")

    cloud.steps.before[INSTALL] = fail_the_second
    with pytest.raises(SprError, match="installing stack upstream failed on 1 of 3 nodes"):
        cloud.up(nodes=3, bake="none")
    installed = cloud.steps.count(INSTALL)
    assert installed == 2

    plan = cloud.plan()
    assert "stack upstream on 1 node" in str(plan.actions) or "on the head" in str(plan.actions)
    cloud.up()
    assert cloud.cluster().is_whole
    assert cloud.steps.count(INSTALL) == 3
    assert purchases(cloud) == 1


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("CreateImage", "ResourceLimitExceeded"),
        ("DescribeSnapshots", "UnauthorizedOperation"),
        ("DeregisterImage", "UnauthorizedOperation"),
    ],
)
def test_ec2_may_refuse_an_image_or_its_removal_to_a_complete_cluster(
    cloud: SimulatedCloud, action: str, code: str
) -> None:
    refusal = f'[[error]]\naction = "{action}"\ncode = "{code}"\nmessage = "not now"\ntimes = 9\n'
    if action == "DeregisterImage":
        cloud.prepared(nodes=2, bake="none")
        (image,) = cloud.found("images").images
        cloud.fake.backend.amis[image.id].state = "failed"
    cloud.faults(refusal)

    for _ in range(2):
        cloud.up(nodes=2, bake="none")

    assert cloud.cluster().is_whole
    # What an image that stays holds is not tried.
    told = ("not now", "not removed")
    notes = [n for n in cloud.progress.notes if any(text in n for text in told)]
    what = f"{image.id} not removed" if action == "DeregisterImage" else "no image this time"
    assert {note.partition(":")[0] for note in notes} == {what}
    assert all(" (" in note and "the next `up` tries again" in note for note in notes)
    cloud.faults("")
    cloud.up()
    assert [image.state for image in cloud.found("images").images] == ["available"]


@pytest.fixture
def pending(cloud: SimulatedCloud) -> Image:
    """The image of a cluster's only node, which takes five minutes."""
    cloud.faults("image_s = 300\n")
    cloud.up(nodes=1, bake="none")
    (image,) = cloud.found("images").images
    assert image.state == "pending"
    return image


def test_down_that_keeps_an_image_has_it_finished_first(
    cloud: SimulatedCloud, pending: Image
) -> None:
    kept = cloud.down(keep_image=True).kept

    assert [i.state for i in kept.images] == ["available"]
    assert cloud.progress.phases.index(f"Wait for image {pending.id}") < next(
        i for i, title in enumerate(cloud.progress.phases) if title.startswith("Terminate")
    )


@pytest.mark.parametrize("is_failed", [True, False])
def test_an_image_that_failed_or_was_never_sealed_is_neither_kept_nor_waited_for(
    cloud: SimulatedCloud, pending: Image, is_failed: bool
) -> None:
    if is_failed:
        cloud.fake.backend.amis[pending.id].state = "failed"
    else:
        unsealed = [{"Key": tags.SEALED, "Value": "no"}]
        cloud.ec2.create_tags(Resources=[pending.id], Tags=unsealed)

    assert cloud.down(keep_image=True).kept == Inventory()
    assert cloud.left() == []
    assert f"Wait for image {pending.id}" not in cloud.progress.phases


def test_a_kept_image_that_failed_makes_room_for_another_of_its_head(
    cloud: SimulatedCloud, pending: Image
) -> None:
    kept = [{"Key": tags.KEPT, "Value": "yes"}]
    cloud.ec2.create_tags(Resources=[pending.id], Tags=kept)
    cloud.fake.backend.amis[pending.id].state = "failed"

    cloud.up()

    (another,) = cloud.found("images").images
    assert (another.id != pending.id, another.name) == (True, pending.name)


def test_an_image_that_fails_while_it_is_waited_for_keeps_no_machine(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.faults("image_s = 300\n")
    cloud.up(nodes=3, bake="none")
    (image,) = cloud.found("images").images

    pass_time = cloud.ctx.clock.sleep

    def fail(seconds: float) -> None:
        if image.id in cloud.fake.backend.amis:
            cloud.fake.backend.amis[image.id].state = "failed"
        pass_time(seconds)

    monkeypatch.setattr(cloud.ctx.clock, "sleep", fail)
    assert cloud.down(keep_image=True).kept == Inventory()
    assert cloud.left() == []
    assert any("it is removed with the rest" in note for note in cloud.progress.notes)
    ends = [title for title in cloud.progress.phases if title.startswith("Terminate")]
    # Nobody pays for three machines while one of them is copied.
    assert cloud.progress.phases.index(ends[0]) < cloud.progress.phases.index(
        f"Wait for image {image.id}"
    )
    assert len(ends[0].split(",")) == 2


def test_the_image_of_a_head_with_jobs_is_for_its_own_cluster_alone(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1, bake="none")
    (image,) = cloud.found("images").images
    cloud.ec2.deregister_image(ImageId=image.id)
    cloud.change_machine(cloud.cluster().head.instance.id, jobs="squad-1")
    cloud.up()
    assert cloud.found("images").images == ()
    assert "no image: there are jobs on the head" in cloud.progress.notes

    cloud.up(nodes=2, bake="head")

    (image,) = cloud.found("images").images
    assert image.tags[tags.USED] == "yes"
    assert cloud.down(keep_image=True).kept == Inventory()
    assert cloud.left() == []


# By the command line


def bake(line: CommandLine) -> CommandResult:
    """Run `bake`, in an empty cloud, once for all tests of this process."""
    result: CommandResult = begin_with(line.cloud, "bake", lambda: line.must("bake", "--yes"))
    return result


def test_a_baked_image_is_found_by_any_cluster_and_nothing_is_installed(line: CommandLine) -> None:
    result = bake(line)
    assert "installs nothing" in result.out
    assert "$0.21 an hour on demand: 1 x $0.2016" in result.err
    assert line.ids() == []
    steps = line.cloud.steps
    assert steps.count(INSTALL) == 1
    image = result.out.split()[0]

    shown = line.must("up", "--name", "other", "--nodes", "2", "--yes")

    assert f"from image {image}" in shown.err
    assert steps.count(INSTALL) == 1
    assert len(line.ids()) == 2
    (listed,) = json.loads(line.must("images", "--json").out)["images"]
    assert (listed["image"], listed["state"], listed["kept"]) == (image, "ready", True)


@pytest.mark.parametrize("step", ["sealing the disk", INSTALL])
def test_interrupted_baking_continues_and_keeps_its_options(line: CommandLine, step: str) -> None:
    def fail() -> None:
        raise HostError("node0", "no SSH at 172.31.0.4: timed out")

    line.cloud.steps.before[step] = fail
    options = ("--instance-type", "m7i.2xlarge", "--proxy", "http://10.0.0.9:3128")
    result = line.run("bake", "--yes", *options)
    (name,) = cluster_names()
    again = "To continue: run the same `spr-cluster bake` again\n"
    assert again in line.must("status", "--name", name).out
    assert "`bake` did not finish." in result.err
    assert f"spr-cluster bake {' '.join(options)} --cloud aws --region us-east-1" in result.err
    line.cloud.steps.before.clear()
    if step == INSTALL:
        line.lose(*line.ids())

    line.must("bake", "--yes")  # the record knows the type

    assert {each["InstanceType"] for each in line.cloud.purchases()} == {"m7i.2xlarge"}
    assert line.ids() == []
    (listed,) = json.loads(line.must("images", "--json").out)["images"]
    assert (listed["state"], listed["kept"]) == ("ready", True)


def test_baking_whose_credentials_expire_at_its_end_names_the_machine_that_is_left(
    line: CommandLine,
) -> None:
    line.cloud.faults(
        "[[error]]\naction = 'TerminateInstances'\ncode = 'ExpiredToken'\ntimes = 9\n"
    )

    result = line.run("bake", "--yes")

    assert len(line.ids()) == 1
    (name,) = cluster_names()
    assert result.code == 1
    assert "To continue:           spr-cluster bake --cloud aws" in result.err
    assert f"To remove what exists: spr-cluster down --name {name}" in result.err
    assert "It exists now and costs money: 1 instance" in result.err
    line.cloud.faults("")
    line.must("bake", "--yes")
    assert len(line.cloud.purchases()) == 1
    assert line.ids() == []


# With packages


class Packages:
    """Installed without uv; ``error`` is what the next installation meets."""

    def __init__(self) -> None:
        self.error: SprError | None = None
        self.refused: SprError | None = None
        self.installed: list[str] = []

    def check(self, *_: object) -> None:
        if self.refused:
            raise self.refused

    def install(self, head: object, packages: object, *_: object) -> None:
        error, self.error = self.error, None
        if error:
            raise error
        self.installed.append(str(packages))


@pytest.fixture
def packages(line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "requirements.txt").write_text("iniconfig\n")
    found = Packages()
    monkeypatch.setattr("jobs.cli.bake.check_packages", found.check)
    monkeypatch.setattr("jobs.cli.bake.install_packages", found.install)
    return found


BAKE = ("bake", "--packages", "requirements.txt", "--yes", "--json")


def test_baked_packages_are_in_the_image_that_up_prefers(
    line: CommandLine, packages: Packages
) -> None:
    plain = bake(line).out.split()[0]

    baked = json.loads(line.must(*BAKE).out)

    assert baked["image"] != plain
    assert packages.installed == ["the packages of requirements.txt"]
    assert baked["packages"].endswith(" requirements.txt")
    assert line.ids() == []
    images = json.loads(line.must("images", "--json").out)["images"]
    assert {i["image"]: i["packages"] for i in images} == {
        plain: "",
        baked["image"]: baked["packages"],
    }
    assert f"from image {baked['image']}" in line.must("up", "--dry-run", "--nodes", "2").out


def test_packages_are_baked_once_and_their_image_also_serves_without_them(
    line: CommandLine, packages: Packages, tmp_path: Path
) -> None:
    first = json.loads(line.must(*BAKE).out)
    before = line.changes
    (tmp_path / "project/same.txt").write_text("# equal\niniconfig")

    again = json.loads(line.must(*BAKE).out)
    same = json.loads(line.must("bake", "--packages", "same.txt", "--yes", "--json").out)
    plain = json.loads(line.must("bake", "--yes", "--json").out)

    assert line.changes == before
    assert again == same == plain == {**first, "made": False}


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("requirements.txt: no solution"), 2), (HostError("node0", "no compiler"), 1)],
)
def test_packages_that_can_not_be_installed_leave_nothing(
    line: CommandLine, packages: Packages, error: SprError, code: int
) -> None:
    packages.error = error

    result = line.run(*BAKE)

    assert (result.code, error.message in result.message) == (code, True)
    assert line.cloud.left() == []


def test_interrupted_baking_of_packages_continues_on_its_machine(
    line: CommandLine, packages: Packages
) -> None:
    packages.error = ConnectionLostError("node0", "the connection broke")
    result = line.run(*BAKE)
    assert "bake --packages requirements.txt --json --cloud aws" in result.err
    assert len(line.ids()) == 1
    (name,) = cluster_names()
    folder = ClusterFiles.of(name).folder
    folder.rename(folder.with_name("elsewhere"))
    refused = line.run(*BAKE).message
    assert "belongs to another SSH key" in refused
    assert "--name, or" not in refused
    folder.with_name("elsewhere").rename(folder)

    line.must(*BAKE)

    assert len(line.cloud.purchases()) == 1
    assert line.cloud.steps.count(INSTALL) == 1
    assert line.ids() == []


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("missing.txt", "--packages missing.txt: no such file"),
        ("empty.txt", "--packages empty.txt: it lists no packages"),
        ("requirements.txt", "no solution"),
    ],
)
def test_a_wrong_list_of_packages_buys_nothing(
    line: CommandLine, packages: Packages, tmp_path: Path, file: str, said: str
) -> None:
    (tmp_path / "project/empty.txt").write_text("# none\n")
    packages.refused = UsageError("no solution")

    result = line.run("bake", "--yes", "--packages", file)

    assert (result.code, said in result.message, line.changes) == (2, True, {})


def test_images_are_listed_and_deleted(line: CommandLine) -> None:
    assert "No images in aws us-east-1" in line.must("images").out
    assert line.must("images", "--delete", "--unused", "--yes").out == "Nothing to delete.\n"
    image = bake(line).out.split()[0]
    line.must("up", "--name", "other", "--nodes", "2", "--yes", "--stack", "intel")
    line.must("down", "--name", "other", "--keep-image", "--yes")
    other = next(i for i in _listed(line) if i != image)
    _tag_image(line, other, tags.INSTALLED, "0" * 12)
    table = line.must("images").out
    assert "outdated" in table
    assert "spr-cluster images --delete --unused" in table
    # The stack may be in a colleague's project.
    bob = "arn:aws:iam::123456789012:user/bob"
    owner = _tag_image(line, other, tags.OWNER, bob)
    left = line.must("images", "--delete", "--unused", "--yes")
    assert left.out == "Nothing to delete.\n"
    by_name = f"spr-cluster images --delete {other} --cloud aws --region us-east-1"
    assert f"Not deleted: images that others made. To delete them: {by_name}\n" in left.err
    assert re.search(rf"^{other} .* bob$", line.must("images").out, re.M)
    _tag_image(line, other, tags.OWNER, owner)

    line.cloud.faults("[[error]]\naction = 'DeregisterImage'\ncode = 'ExpiredToken'\n")
    expired = line.run("images", "--delete", "--unused", "--yes")
    assert expired.code == 1  # 2 would say that nothing was changed
    assert "`spr-cluster gc --cloud aws --region us-east-1` show what is left" in expired.message
    unused = line.must("images", "--delete", "--unused", "--yes", "--json").out
    assert json.loads(unused)["deleted"] == [other]
    assert _listed(line) == [image]
    assert line.must("images", "--delete", image, "--yes").out == f"Deleted: {image}.\n"
    assert line.cloud.left() == []


def test_the_image_of_a_cluster_with_machines_is_not_pruned(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    (image,) = _listed(line)
    _tag_image(line, image, tags.INSTALLED, "0" * 12)

    assert line.must("images", "--delete", "--unused", "--yes").out == "Nothing to delete.\n"
    refused = line.run("images", "--delete", image, "--yes")
    assert refused.message == f"image {image} is in use: cluster 'spr' has machines"
    foreign = line.run("images", "--delete", "ami-12c6146b", "--yes")
    assert "no image 'ami-12c6146b' made by this tool" in foreign.message
    assert _listed(line) == [image]
    line.must("down", "--yes", "--keep-image")
    assert line.must("images", "--delete", "--unused", "--yes").out == f"Deleted: {image}.\n"


def test_a_kept_image_for_larger_disks_is_named(line: CommandLine) -> None:
    line.begin("--nodes", "2", "--volume-gib", "300")
    line.must("down", "--yes", "--keep-image")

    shown = line.must("up", "--nodes", "2", "--dry-run").out

    assert "from Canonical's Ubuntu image" in shown
    assert "needs a disk of 300 GiB: --volume-gib 300 uses it." in shown


def _tag_image(line: CommandLine, image: str, key: str, value: str) -> str:
    """Set a tag; return what it was."""
    labels: dict[str, str] = line.cloud.fake.backend.tags[image]
    was, labels[key] = labels[key], value
    return was


def _listed(line: CommandLine) -> list[str]:
    result = json.loads(line.must("images", "--json").out)
    return [str(image["image"]) for image in result["images"]]


def test_many_nodes_do_not_all_ask_one_package_index(line: CommandLine) -> None:
    line.cloud.faults("[quota]\non_demand_vcpus = 100000\n")
    assert "Head node" in line.must("up", "--dry-run", "--nodes", "33").out
    assert "Head node" not in line.must("up", "--dry-run", "--nodes", "32").out
