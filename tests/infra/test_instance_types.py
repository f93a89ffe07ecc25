"""The table of types with AMX, against AWS's own figures."""

from __future__ import annotations

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES as EC2_TYPES

from infra.cost.compared_types import choose_types, compare_types
from infra.cost.prices import table_prices
from infra.instance_types import FAMILIES, INSTANCE_TYPES, InstanceType

# Dollars per hour on demand in us-east-1 (July 2026): https://aws.amazon.com/ec2/pricing/on-demand/
_PUBLISHED = {
    "r7iz.metal-16xl": 6.5472,
    "r7iz.32xlarge": 11.904,
    "c7i.large": 0.08925,
    "c7i-flex.16xlarge": 2.7132,
    "m7i.metal-24xl": 5.32224,
    "m7i-flex.8xlarge": 1.53216,
    "r7i.metal-48xl": 12.7008,
    "i7i.metal-24xl": 9.6204,
    "i7ie.48xlarge": 24.9504,
    "c8i.32xlarge": 5.99744,
    "c8i-flex.4xlarge": 0.71216,
    "m8id.metal-48xl": 12.52992,
    "r8i.metal-96xl": 26.67264,
    "x8i.64xlarge": 28.01024,
}


def test_prices_are_as_published() -> None:
    found = {name: INSTANCE_TYPES[name].table_usd for name in _PUBLISHED}

    assert found == pytest.approx(_PUBLISHED, rel=1e-4)
    names = ("r7iz.16xlarge", "r7iz.32xlarge", "c7i.24xlarge", "c7i.48xlarge", "c8i.48xlarge")
    assert [INSTANCE_TYPES[name].sockets for name in names] == [1, 2, 1, 2, 1]


def test_all_sizes_of_the_families_are_those_of_ec2() -> None:
    known = {name for name in EC2_TYPES if name.partition(".")[0] in FAMILIES}

    assert known == {name for name in INSTANCE_TYPES if name != "c6i.16xlarge"}
    for name in known:
        about, found = EC2_TYPES[name], INSTANCE_TYPES[name]
        cpus = about["VCpuInfo"]
        assert (found.vcpus, found.cores) == (cpus["DefaultVCpus"], cpus["DefaultCores"]), name
        assert found.memory_gib == about["MemoryInfo"]["SizeInMiB"] / 1024, name
        assert found.ghz == about["ProcessorInfo"]["SustainedClockSpeedInGhz"], name
        network = about["NetworkInfo"]
        varies = network["NetworkPerformance"].startswith("Up to")
        expected = None if varies else network["NetworkCards"][0]["BaselineBandwidthInGbps"]
        assert found.gbit == expected, name
    # Not in the table; the tool does not use its second card.
    assert InstanceType.from_aws(EC2_TYPES["c8in.metal-96xl"]).gbit == 300


def test_the_cheapest_work_comes_first() -> None:
    prices = table_prices("us-east-1", [*INSTANCE_TYPES])
    found = compare_types(choose_types(("r7iz", "c7i.metal-24xl", "c8i"), every=False), prices)
    costs = [each.usd_per_pflops_hour for each in found]

    assert costs == sorted(costs, key=lambda each: each or 0)
    by_name = {each.type.name: each for each in found}
    assert "c8i.8xlarge" not in by_name
    # 32 cores x 1,024 x 3.9 GHz are 127.8 TFLOPS.
    assert by_name["r7iz.metal-16xl"].usd_per_pflops_hour == pytest.approx(51.23, abs=0.01)
    assert by_name["c7i.metal-24xl"].usd_per_pflops_hour == pytest.approx(29.96, abs=0.01)
    assert by_name["r7iz.metal-16xl"].usd_to_boot == pytest.approx(6.5472 / 3)
    assert by_name["r7iz.16xlarge"].usd_to_boot == pytest.approx(5.952 / 20)
