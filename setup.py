"""With WITCERT_BUILD_KERNELS=1 the kernels for CPUs are compiled into the wheel, which then fits machines of this kind.

Else nothing is added to what `pyproject.toml` says: the wheel fits every machine, and compiles on first use.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("witcert_core/kernels/native")


class BuildWithKernels(build_py):
    """Compiled kernels beside their sources, for every level of this machine's processors that the compiler knows."""

    def run(self) -> None:
        super().run()
        # The package itself imports PyTorch, which is not there when a wheel is built.
        sys.path.insert(0, str(NATIVE))
        import toolchain

        levels = toolchain.LEVELS.get(platform.machine())
        if not levels:
            raise SystemExit(
                f"WITCERT_BUILD_KERNELS: no kernels are known for {platform.machine()} processors; unset it"
            )
        built = Path(self.build_lib, NATIVE, "built")
        libraries = {
            built / level.name / f"{op}.so": (op, (*toolchain.FLAGS, *level.flags))
            for level in levels
            for op in toolchain.operations()
        }
        try:
            toolchain.compile_all(libraries)
        except toolchain.CompileError as error:
            raise SystemExit(f"WITCERT_BUILD_KERNELS: {error}") from error


class WithLibraries(Distribution):
    """What is in it is for one kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """Any Python 3: the libraries have a C interface."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if os.environ.get("WITCERT_BUILD_KERNELS") == "1":
    setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
else:
    setup()
