"""The steps there are, one for each kind of head."""

from __future__ import annotations

from eagle_train.training.eagle1_step import Eagle1Step
from eagle_train.training.eagle3_step import Eagle3Step
from eagle_train.training.medusa_step import MedusaStep

Step = Eagle1Step | Eagle3Step | MedusaStep
