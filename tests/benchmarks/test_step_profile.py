"""Where a step's time goes: real operations and compiled kernels' names by group, and the projection."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step_profile import (
    PRODUCTS,
    PYTHON,
    Product,
    StepProfile,
    find_group,
    measure,
    profile_steps,
    project,
)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::addmm", PRODUCTS),
        ("aten::bmm", PRODUCTS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("graph_1_cpp_fused__softmax__to_copy_add_clone_3", "attention"),
        ("graph_1_cpp_fused_add_native_dropout_native_layer_norm_5", "normalization and dropout"),
        ("aten::bernoulli_", "dropout and random numbers"),
        ("graph_1_cpp_fused__to_copy_gelu_view_4", "GELU"),
        ("aten::_fused_adamw_", "optimizer and clipping"),
        ("aten::embedding_dense_backward", "embedding"),
        ("aten::copy_", "elementwise, copies, sums"),
    ],
)
def test_an_operation_belongs_to_one_group(name: str, group: str) -> None:
    assert find_group(name).startswith(group)


def test_a_real_product_is_found_with_its_bytes_and_operations() -> None:
    left, right = torch.randn(64, 32), torch.randn(32, 16)

    def train() -> float:
        (left @ right).tanh_()
        return 5.0

    profile = profile_steps(train, 4)
    (product,) = profile.products
    assert product.bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert product.operations == 2 * 64 * 32 * 16
    assert product.seconds == pytest.approx(profile.groups[PRODUCTS], abs=1e-6)
    assert profile.groups["elementwise, copies, sums"] > 0
    assert profile.groups[PYTHON] > 0
    assert sum(profile.groups.values()) == pytest.approx(5.0)
    assert profile.outside == pytest.approx(5.0 - product.seconds, abs=1e-5)
    assert StepProfile.parse([profile.groups, [list(product)]]) == profile


def test_a_product_into_an_existing_tensor_counts_its_operands() -> None:
    bias, left, right, result = (torch.randn(*s) for s in ((16,), (64, 32), (32, 16), (64, 16)))

    def train() -> float:
        torch.addmm(bias, left, right, out=result)
        return 1.0

    (product,) = profile_steps(train, 4).products
    assert product.operations == 2 * 64 * 32 * 16


def test_batched_products_count_each_one() -> None:
    assert measure([(3, 64, 32), (3, 32, 16)], 2) == (
        3 * 2 * (64 * 32 + 32 * 16 + 64 * 16),
        3 * 2 * 64 * 32 * 16,
    )
    assert measure([], 2) == (0, 0)


def test_faster_products_stop_at_the_speed_of_memory() -> None:
    products = [Product(8.0, 10**9, 1), Product(8.0, 0, 1)]
    profile = StepProfile({PRODUCTS: 16.0, "attention": 1.0}, products)
    assert project(profile, 1, 0.5) == 17.0
    # Twice as fast, and 2 s to move 1 GB at 0.5 GB/s.
    assert project(profile, 2, 0.5) == 9.0
    assert project(profile, 8, 0.5) == 1.0 + 2.0 + 1.0
