"""What a job has cost, will cost, and may cost."""

from __future__ import annotations

import pytest

from infra.cost.spending import Spending


@pytest.mark.parametrize(
    ("spending", "text"),
    [
        (Spending(600, 1200, 6.0), "$1.00 spent, $3.00 expected"),
        (Spending(600, None, 6.0, budget=12.0), "$1.00 spent, $11.00 left"),
        (Spending(600, None, 6.0, max_time_s=3600), "$1.00 spent, $5.00 left"),
        (Spending(9000, 0, 6.0, budget=12.0), "$15.00 spent, $15.00 expected, $0.00 left"),
        (Spending(600, 1200, None, budget=12.0), ""),
        # After 100 s of other nodes.
        (Spending(600, 1200, 6.0, 12.0, 0.0, 100, 2.0), "$3.00 spent, $5.00 expected, $9.00 left"),
        (Spending(600, None, 6.0, 0.0, 3700, 100, 2.0), "$3.00 spent, $5.00 left"),
    ],
)
def test_spending(spending: Spending, text: str) -> None:
    assert spending.describe() == text
