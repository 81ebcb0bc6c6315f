"""Several ranks that write one history: a version is committed by all of them, or by none."""

from flashwarp.checkpoint.ranks.agreement import Agreement, Attempt, Group
from flashwarp.checkpoint.ranks.committing import Ended, GroupCommits

__all__ = ["Agreement", "Attempt", "Ended", "Group", "GroupCommits"]
