"""Graph networks on mini-batches: three models, and graphs to train them on."""

from flashwarp.apps.gnn.models import MODELS, make
from flashwarp.apps.gnn.power_law import power_law

__all__ = ["MODELS", "make", "power_law"]
