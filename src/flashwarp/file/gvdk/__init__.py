"""Files with a format of their own: growth, dirty state, integrity and identity; docs/files.md."""

from flashwarp.file.gvdk.image import Gvdk
from flashwarp.file.gvdk.inspecting import Recovered, Report, is_gvdk
from flashwarp.file.gvdk.layout import DamagedImageError

__all__ = ["DamagedImageError", "Gvdk", "Recovered", "Report", "is_gvdk"]
