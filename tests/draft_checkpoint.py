"""A draft model that is right now and then: the bundled checkpoint without its last layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from minivllm.config import BUNDLED_CHECKPOINT


def make_draft_checkpoint(directory: Path, num_layers: int = 3) -> Path:
    """Write the first `num_layers` of the bundled checkpoint's four layers to `directory`, which is returned."""
    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True)
    for file in BUNDLED_CHECKPOINT.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, directory)
    tensors = load_file(BUNDLED_CHECKPOINT / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    save_file(kept, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    config.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
