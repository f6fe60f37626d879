"""Installed software, told from files: nothing is imported to know."""

from __future__ import annotations

import importlib.machinery
import sys
import types
import warnings
from collections.abc import Container, Sequence
from pathlib import Path

import pytest

from pytest_cudaenv.host import software
from pytest_cudaenv.host.software import (
    InstalledDistributions,
    InstalledModules,
    Software,
    TorchBuild,
    canonical,
    find_module,
    imported_arch_list,
    installed_software,
    installed_torch,
    torch_build_of,
)

RAISES = "raise RuntimeError('imported')\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, whose modules must not be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, *paths: str, text: str = RAISES) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


class TestFindModule:
    def test_parents_are_not_imported(self, site: Path) -> None:
        write(site, "fx_parent/__init__.py", "fx_parent/child/__init__.py", "fx_parent/child/leaf.py")
        assert find_module("fx_parent") == site / "fx_parent/__init__.py"
        assert find_module("fx_parent.child") == site / "fx_parent/child/__init__.py"
        assert find_module("fx_parent.child.leaf") == site / "fx_parent/child/leaf.py"
        assert not any(name.startswith("fx_parent") for name in sys.modules)

    @pytest.mark.parametrize(
        "name", ["fx_absent", "fx_single.child", "fx_pack.absent", "fx_pack.absent.leaf", "", "fx_pack..x"]
    )
    def test_absent(self, site: Path, name: str) -> None:
        write(site, "fx_single.py", "fx_pack/__init__.py")
        assert find_module(name) is None

    def test_namespace_packages(self, site: Path) -> None:
        # FA4 is `flash_attn/cute` without a `flash_attn/__init__.py`.
        write(site, "fx_space/cute/__init__.py", "fx_space/inner/leaf.py")
        assert find_module("fx_space") == site / "fx_space"
        assert find_module("fx_space.cute") == site / "fx_space/cute/__init__.py"
        assert find_module("fx_space.inner") == site / "fx_space/inner"
        assert find_module("fx_space.inner.leaf") == site / "fx_space/inner/leaf.py"
        assert find_module("fx_space.absent") is None

    def test_editable_installs_have_finders_of_their_own(
        self, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = tmp_path / "elsewhere" / "src"
        write(source, "fx_editable/__init__.py", "fx_editable/leaf.py")

        class Finder:
            @staticmethod
            def find_spec(
                name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
            ) -> importlib.machinery.ModuleSpec | None:
                if name != "fx_editable":
                    return None
                return importlib.machinery.PathFinder.find_spec(name, [str(source)])

        assert find_module("fx_editable") is None
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
        assert find_module("fx_editable.leaf") == source / "fx_editable/leaf.py"
        assert "fx_editable" not in sys.modules

    def test_container(self) -> None:
        modules: Container[object] = InstalledModules()
        assert "json.decoder" in modules
        assert "sys" in modules
        assert "json.absent" not in modules
        assert 3 not in modules


class TestDistributions:
    def install(self, site: Path, folder: str, metadata: str | None) -> None:
        (site / folder).mkdir()
        if metadata is not None:
            (site / folder / "METADATA").write_text(metadata)

    def test_version_under_every_spelling(self, site: Path) -> None:
        self.install(site, "fx_dist-1.2.dist-info", "Metadata-Version: 2.1\nName: Fx.Dist\nVersion: 1.2\n")
        installed = Software(InstalledDistributions())
        for name in ("fx-dist", "Fx_Dist", "FX.DIST"):
            assert installed.version(name) == "1.2"
        assert installed.version("fx-absent") is None
        assert "fx-dist" in set(InstalledDistributions())

    @pytest.mark.parametrize("metadata", [None, "", "Metadata-Version: 2.1\nName: fx-half\n"])
    def test_half_removed_is_not_installed(self, site: Path, metadata: str | None) -> None:
        self.install(site, "fx_half-1.0.dist-info", metadata)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Software(InstalledDistributions()).version("fx-half") is None
            assert len(InstalledDistributions()) >= 1

    def test_unreadable_metadata_is_not_installed(self, site: Path) -> None:
        self.install(site, "fx_bytes-1.0.dist-info", None)
        (site / "fx_bytes-1.0.dist-info/METADATA").write_bytes(b"Name: \xff\xfe\nVersion: 1\n")
        assert Software(InstalledDistributions()).version("fx-bytes") is None
        assert len(InstalledDistributions()) >= 1

    def test_each_is_looked_up_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def version(name: str) -> str | None:
            asked.append(name)
            return {"fx-a": "1"}.get(name)

        monkeypatch.setattr(software, "_installed_version", version)
        installed = Software(InstalledDistributions())
        assert [installed.version(n) for n in ("fx-a", "Fx_A", "fx-b", "fx-b")] == ["1", "1", None, None]
        assert asked == ["fx-a", "fx-b"]


@pytest.mark.parametrize(
    ("name", "expected"), [("Flash_Attn.3", "flash-attn-3"), ("a--b__c", "a-b-c"), ("torch", "torch")]
)
def test_canonical(name: str, expected: str) -> None:
    assert canonical(name) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.11.0+cu130", TorchBuild("2.11.0+cu130", cuda="13.0")),
        ("2.6.0+cu118", TorchBuild("2.6.0+cu118", cuda="11.8")),
        ("2.11.0+rocm6.4", TorchBuild("2.11.0+rocm6.4", hip="6.4")),
        ("2.11.0+cpu", TorchBuild("2.11.0+cpu")),
        ("2.11.0+cpu.cxx11.abi", TorchBuild("2.11.0+cpu.cxx11.abi")),
        ("2.11.0", None),
        ("2.11.0+git1234", None),
    ],
)
def test_torch_build_of(version: str, expected: TorchBuild | None) -> None:
    assert torch_build_of(version) == expected


class TestAssuming:
    BASE = Software({"torch": "2.13.0+cpu", "numpy": "2.0"}, torch=TorchBuild("2.13.0+cpu"))

    def test_adds_and_replaces(self) -> None:
        assumed = self.BASE.assuming({"Flash_Attn": "2.8.3", "numpy": "1.26"})
        assert assumed.version("flash-attn") == "2.8.3"
        assert assumed.version("numpy") == "1.26"
        assert assumed.assumed == {"flash-attn", "numpy"}
        assert assumed.torch == self.BASE.torch
        assert self.BASE.version("flash-attn") is None

    def test_looks_nothing_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        monkeypatch.setattr("pytest_cudaenv.host.software._installed_version", lambda name: asked.append(name) or "1.0")
        monkeypatch.setattr(InstalledDistributions, "__iter__", lambda self: pytest.fail("looked all of them up"))
        assumed = Software(InstalledDistributions()).assuming({}).assuming({"flash-attn": "2.8.3"})
        assert (assumed.version("flash-attn"), asked) == ("2.8.3", [])
        assert (assumed.version("Some.Other"), asked) == ("1.0", ["some-other"])

    def test_torch_with_its_build(self) -> None:
        assert self.BASE.assuming({"torch": "2.11.0+cu130"}).torch == TorchBuild("2.11.0+cu130", cuda="13.0")
        # A bare version says nothing about the build.
        assert self.BASE.assuming({"torch": "2.11.0"}).torch == self.BASE.torch

    def test_assumptions_add_up(self) -> None:
        twice = self.BASE.assuming({"a": "1"}).assuming({"b": "2"})
        assert twice.assumed == {"a", "b"}
        assert (twice.version("a"), twice.version("b")) == ("1", "2")


class TestTorchBuild:
    def install(self, site: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        write(site, "torch/__init__.py")
        write(site, "torch/version.py", text=version)
        monkeypatch.delitem(sys.modules, "torch", raising=False)

    def test_is_read_without_importing(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = (
            "from typing import Optional\n__all__ = ['cuda']\n__version__ = '2.13.0+cu130'\ndebug = False\n"
            "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
        )
        self.install(site, text, monkeypatch)
        assert installed_torch() == TorchBuild("2.13.0+cu130", cuda="13.0")
        assert "torch" not in sys.modules

    def test_rocm(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # ROCM-1
        self.install(site, "__version__ = '2.9.0+rocm6.4'\ncuda = None\nhip = '6.4.43482'\n", monkeypatch)
        assert installed_torch() == TorchBuild("2.9.0+rocm6.4", hip="6.4.43482")

    @pytest.mark.parametrize("text", ["def (", "x = '\x00'"])
    def test_unreadable(self, site: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(site, text, monkeypatch)
        assert installed_torch() is None

    def test_version_file_missing(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(site, "", monkeypatch)
        (site / "torch/version.py").unlink()
        assert installed_torch() is None

    def test_architectures_are_those_of_an_imported_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = types.ModuleType("torch")
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert imported_arch_list() is None
        torch._C = types.SimpleNamespace(_cuda_getArchFlags=lambda: "sm_80 sm_90 compute_90")  # type: ignore[attr-defined]
        assert imported_arch_list() == ("sm_80", "sm_90", "compute_90")
        torch._C._cuda_getArchFlags = lambda: None
        assert imported_arch_list() is None


def test_installed_software_is_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = installed_software()
    assert found.version("pytest") == pytest.__version__
    assert found.version("surely-not-installed") is None
    assert "pytest" in found.modules
    assert found.environ["HF_HUB_OFFLINE"] == "1"
    assert found.assumed == frozenset()
