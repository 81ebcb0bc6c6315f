"""Several ranks that write one history: a version is committed by all of them, or by none."""

from flashwarp.checkpoint.ranks.agreement import Attempt, Group
from flashwarp.checkpoint.ranks.committing import Ended, GroupCommits

__all__ = ["Attempt", "Ended", "Group", "GroupCommits"]
