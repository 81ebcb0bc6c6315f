"""Compiles the built-in kernels for GPUs while the package is built: CMake calls this file.

    python native/cubins.py FOLDER_OF_THE_EXTENSION OUTPUT_FOLDER ARCHITECTURE... [POLICY...]

If policies are named, it compiles for these alone, which takes less time in tests. Needs the
extension, cuda-bindings and NVRTC, and nothing else that the package needs.
"""

import ctypes
import sys
import types
from pathlib import Path

extension, output, *chosen = sys.argv[1:]

# cuda-bindings looks for NVRTC in the interpreter's own folder of packages, and takes one that is
# loaded first. What a build asks for lies in another folder of the path.
for folder in sys.path:
    for library in Path(folder).glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.12"):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

# Importing the package itself would import numpy, which builds do not have.
package = types.ModuleType("flashwarp")
package.__path__ = [str(Path(__file__).parents[1] / "src" / "flashwarp"), extension]
sys.modules["flashwarp"] = package

from flashwarp._jit import nvrtc, precompiled  # noqa: E402
from flashwarp.policy import POLICIES  # noqa: E402

architectures = [name for name in chosen if name not in POLICIES]
policies = [POLICIES[name] for name in chosen if name in POLICIES]
precompiled.build(Path(output), architectures, policies or POLICIES.values())
major, minor = nvrtc.version()
print(f"NVRTC {major}.{minor} compiled the built-in kernels, for drivers of CUDA {major} and later")
