"""What training minimizes, on the rotated and fake-quantized network; one file an objective.

The names below are those by which runs recorded the first three; a new objective is named by its own file.
"""

from rotexp.training.objectives.cross_entropy import CrossEntropy
from rotexp.training.objectives.kl_divergence import KLDivergence
from rotexp.training.objectives.kl_topk import TopKKLDivergence
from rotexp.training.objectives.protocol import Objective, Teacher

__all__ = ["CrossEntropy", "KLDivergence", "Objective", "Teacher", "TopKKLDivergence"]
