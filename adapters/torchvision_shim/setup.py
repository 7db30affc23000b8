"""Puts a `.pth` beside the modules: the torchvision schemas must exist before anything imports torchvision."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    def run(self) -> None:
        super().run()
        Path(self.build_lib, "torchvision_schema_shim.pth").write_text("import torchvision_schema_shim\n")


setup(cmdclass={"build_py": BuildWithPth})
