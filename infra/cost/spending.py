"""What a job has cost, will cost, and may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spending:
    """What a job costs: it took some seconds, and needs others, ``None`` if that is unknown.

    The limits of a resumed job include its earlier runs, perhaps on other nodes.
    """

    took_s: float
    left_s: float | None
    usd_per_hour: float | None
    budget: float = 0.0
    max_time_s: float = 0.0
    earlier_s: float = 0.0
    earlier_usd: float = 0.0

    @property
    def spent(self) -> float | None:
        return self._usd(self.took_s)

    @property
    def expected(self) -> float | None:
        """US dollars until its last step."""
        return None if self.left_s is None else self._usd(self.took_s + self.left_s)

    @property
    def left(self) -> float | None:
        """US dollars of its limit, by --budget or --max-time."""
        longest = self.max_time_s - self.earlier_s
        limit = self.budget or (self._usd(longest) if self.max_time_s else None)
        return None if not limit or self.spent is None else max(0.0, limit - self.spent)

    def _usd(self, seconds: float) -> float | None:
        """Return what so many seconds of this run cost, with the earlier runs."""
        if self.usd_per_hour is None:
            return None
        return self.earlier_usd + self.usd_per_hour * seconds / 3600

    def as_dict(self) -> dict[str, float | None]:
        """Return it for ``--json``."""
        found = {"usd_spent": self.spent, "usd_expected": self.expected, "usd_left": self.left}
        return {name: usd if usd is None else round(usd, 4) for name, usd in found.items()}

    def describe(self) -> str:
        """Return ``$1.20 spent, $3.40 expected, $8.80 left``; "" if the price is unknown."""
        parts = {"spent": self.spent, "expected": self.expected, "left": self.left}
        return ", ".join(f"${usd:.2f} {name}" for name, usd in parts.items() if usd is not None)
