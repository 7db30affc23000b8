"""Makes `import torchvision` work beside a CPU build of PyTorch.

The torchvision wheel on PyPI is built against CUDA; beside a CPU torch its extension library cannot be loaded, so the
operator schemas it registers are missing and torchvision's own module code fails on them. Engines import torchvision
for models that see, in whose modules the text models of a family may be (Qwen3.5 in vLLM). This hook declares the two
schemas (without kernels: calling them still fails) the first time torchvision is looked up.
"""

import importlib.abc
import sys

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _DeclareOnFirstImport(importlib.abc.MetaPathFinder):
    library = None  # kept alive: the schemas go when the torch.library object goes

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
                type(self).library = torch.library.Library("torchvision", "DEF")
                for schema in _SCHEMAS:
                    type(self).library.define(schema)
        return None


sys.meta_path.insert(0, _DeclareOnFirstImport())
