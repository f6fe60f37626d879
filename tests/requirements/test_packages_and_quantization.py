"""Packages by PEP 508, and the packages of quantization methods."""

from __future__ import annotations

from pathlib import Path

import pytest
from fabricated_hosts import codes, software

from pytest_cudaenv.requirements import quantization
from pytest_cudaenv.requirements.packages import package_reasons, parse_package, top_module, try_import
from pytest_cudaenv.requirements.quantization import UnknownMethodError, method_name
from pytest_cudaenv.requirements.reason import Rank

HAVE = software({"torch": "2.13.0+cpu", "flash-attn": "2.3.0"})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("torch", []),
        ("torch>=2.6", []),
        ("Torch[opt-einsum]>=2.6,<3", []),
        ("torch>=3", ["package-version"]),
        ("xformers", ["package-missing"]),
        ("flash_attn>=2.5 | xformers", ["package-version"]),
        ("xformers | flash_attn", []),
        ("xformers|torch>=2", []),
        ("xformers; python_version < '3'", []),
        ("xformers; python_version < '3' | torch>=3", ["package-version"]),
    ],
)
def test_packages(spec: str, expected: list[str]) -> None:
    assert codes(package_reasons(spec, HAVE, None)) == expected


def test_what_a_package_reason_says() -> None:
    [reason] = package_reasons("flash-attn>=2.5 | xformers", HAVE, None)
    assert str(reason) == "[package-version] needs flash-attn>=2.5 | xformers; have 2.3.0"
    assert reason.remedy == "Run pip install 'flash-attn>=2.5' or pip install 'xformers'."


@pytest.mark.parametrize(
    "text", ["", "a |", "| a", "a >= 2 3", "a @ https://x/y.whl", "a; extra == 'b'", "a==x", None, 3]
)
def test_wrong_requirements(text: str) -> None:
    with pytest.raises(ValueError, match="write PEP 508 requirements"):
        parse_package(text)


def test_requirements_are_made_even() -> None:
    assert parse_package("a>=1|b [c] ") == "a>=1 | b[c]"


def test_broken_packages_quote_their_error() -> None:
    found = software({"brokenthing": "1.0"})
    error = "OSError: libcudart.so.12: cannot open shared object file"
    [reason] = package_reasons("brokenthing", found, lambda _: error)
    assert (reason.code, reason.rank) == ("package-broken", Rank.BROKEN)
    assert reason.have.startswith("libcudart.so.12: cannot")
    assert error in reason.remedy
    assert package_reasons("brokenthing", found.assuming({"brokenthing": "1.0"}), lambda _: error) == []


def test_a_broken_alternative_is_told_before_a_missing_one() -> None:
    found = software({"brokenthing": "1.0"})
    assert codes(package_reasons("absent | brokenthing", found, lambda _: "E: x")) == ["package-broken"]


def add_distribution(folder: Path, name: str, **files: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for file, text in files.items():
        (info / file.replace("__", ".")).write_text(text)


def test_which_module_proves_a_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_distribution(tmp_path, "Some_Thing", top_level__txt="_private\nsome_thing\nother\n")
    add_distribution(tmp_path, "pillowlike", RECORD="PILlike/__init__.py,,\nPILlike/sub/x.py,,\nlone.py,,\n")
    for file in ("PILlike/__init__.py", "PILlike/sub/x.py", "lone.py"):  # Python 3.12 lists only files that exist
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    add_distribution(tmp_path, "headless", RECORD="headless-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert top_module("some-thing") == "some_thing"
    assert top_module("pillowlike") == "PILlike"
    assert top_module("headless") is None
    assert top_module("not-installed-at-all") == "not_installed_at_all"


def test_try_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cudaenv_probe_broken.py").write_text("raise OSError('first line\\nsecond line')")
    (tmp_path / "cudaenv_probe_works.py").write_text("def function(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert try_import("cudaenv_probe_works") is None
    assert try_import("cudaenv_probe_works:function") is None
    assert try_import("cudaenv_probe_broken") == "OSError: first line"
    assert (try_import("cudaenv_probe_works:gone") or "").startswith("AttributeError: ")
    assert (try_import("cudaenv_probe_absent") or "").startswith("ModuleNotFoundError: ")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bnb", "bitsandbytes"),
        ("BitsAndBytes", "bitsandbytes"),
        ("autoround", "auto-round"),
        ("compressed_tensors", "compressed-tensors"),
        ("finegrained fp8", "fp8"),
        ("FBGEMM-FP8", "fbgemm_fp8"),
        ("mxfp4", "mxfp4"),
    ],
)
def test_method_names(text: str, name: str) -> None:
    assert method_name(text) == name


def test_unknown_methods() -> None:
    with pytest.raises(UnknownMethodError, match="did you mean 'gptq'\\? choose from bitsandbytes, gptq, awq"):
        method_name("gptx")


# method -> (what is installed, the codes of what is then missing)
INSTALLED = [
    ("bitsandbytes", {}, ["quant-package", "quant-package"]),
    ("bitsandbytes", {"accelerate": "1.15", "bitsandbytes": "0.49"}, []),
    ("bitsandbytes", {"accelerate": "1.15", "bitsandbytes": "0.46.0"}, ["quant-version"]),
    ("bitsandbytes", {"accelerate": "1.0", "bitsandbytes": "0.46.0"}, ["quant-version", "quant-version"]),
    ("gptq", {"optimum": "2.0"}, ["quant-package"]),
    ("quanto", {"optimum-quanto": "0.2.7", "accelerate": "1.15"}, []),
    ("fp8", {"accelerate": "1.15"}, ["quant-package"]),
    ("fbgemm_fp8", {"fbgemm-gpu-genai": "1.4", "accelerate": "1.15"}, []),
    ("fbgemm_fp8", {"accelerate": "1.15"}, ["quant-package"]),
    ("mxfp4", {"accelerate": "1.15", "triton": "3.3.1", "kernels": "0.17.2"}, ["quant-version"]),
    ("fp_quant", {"fp-quant": "0.3.2", "qutlass": "0.1"}, ["quant-version"]),
    ("higgs", {"accelerate": "1.15"}, ["quant-package", "quant-package"]),
    ("quark", {"amd-quark": "0.12"}, []),
    ("sinq", {}, ["quant-package"]),
    ("gemma", {}, []),
]


@pytest.mark.parametrize(("method", "installed", "expected"), INSTALLED)
def test_packages_of_methods(method: str, installed: dict[str, str], expected: list[str]) -> None:
    assert codes(quantization.software_reasons(method, software(installed), None)) == expected


def test_a_method_whose_package_breaks() -> None:
    found = software({"accelerate": "1.15", "bitsandbytes": "0.49"})

    def imports(target: str) -> str | None:
        return "RuntimeError: CUDA Setup failed" if target == "bitsandbytes" else None

    [reason] = quantization.software_reasons("bitsandbytes", found, imports)
    assert (reason.code, reason.rank) == ("quant-broken", Rank.BROKEN)
    assert str(reason) == "[quant-broken] bitsandbytes must import; have RuntimeError: CUDA Setup fai…"


def test_a_module_under_an_unknown_distribution_counts() -> None:
    assert quantization.software_reasons("quark", software({}, {"quark"}), None) == []
