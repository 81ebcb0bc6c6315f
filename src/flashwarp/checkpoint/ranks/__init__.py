"""Several ranks that write one history: a version is committed by all of them, or by none."""

from flashwarp.checkpoint.ranks.agreement import Group
from flashwarp.checkpoint.ranks.committing import Agreement, Attempt, Ended, GroupCommits

__all__ = ["Agreement", "Attempt", "Ended", "Group", "GroupCommits"]
