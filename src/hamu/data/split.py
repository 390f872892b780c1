"""The division of a data set into what must go and what must stay."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hamu.data.images import ImageData


@dataclass(frozen=True)
class UnlearningData:
    """The three sets of an unlearning problem.

    Attributes:
        retain: training records that stay.
        forget: training records that must go.
        test: records that were never trained on, None where there are none.
        forget_name: how the forget set was chosen, for records and tables.
        target_class: the class that is being forgotten, None if the forget set is not built on one.
    """

    retain: ImageData
    forget: ImageData
    test: ImageData | None
    forget_name: str
    target_class: int | None = None

    def normalized(self, mean: list[float], std: list[float]) -> UnlearningData:
        """All sets, normalised by the same statistics."""
        test = None if self.test is None else self.test.normalized(mean, std)
        return replace(
            self, retain=self.retain.normalized(mean, std), forget=self.forget.normalized(mean, std), test=test
        )
