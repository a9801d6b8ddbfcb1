"""Loading code by import path, and only from where the operator allows it.

A path is ``module:Name``. It may be loaded from the scenario's own folder, which must lie
below one of the code roots, or from an installed package under an allowed prefix.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.errors import CodeError
from shared.settings import Settings

OWN_PACKAGES = frozenset(
    {"populace", "shared", "services", "agent_host", "env_service", "persona_service"}
)
"""Our top-level packages; a user's module of such a name would hide or be hidden."""


def _package_root(module: Any) -> Path | None:
    """The folder from which a module's top-level package is imported."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path: Path = Path(file).resolve()
    depth: int = module.__name__.count(".") + (1 if path.name == "__init__.py" else 0)
    return path.parents[depth]


def import_path(cls: type) -> tuple[str, Path | None]:
    """The import path of a class, and the folder that must be searched for it.

    Raises:
        CodeError: another process could not import it (a local class, a notebook's cell).
    """
    if "<locals>" in cls.__qualname__:
        raise CodeError(
            f"the class {cls.__qualname__} is made inside a function, where no worker can "
            "import it; define it at the top level of a module"
        )
    name = cls.__module__
    module = sys.modules.get(name)
    if name == "__main__":
        spec = getattr(module, "__spec__", None)
        file = getattr(module, "__file__", None)
        if spec is not None and spec.name != "__main__":
            name = spec.name.removesuffix(".__main__")
            depth = name.count(".") + 1
            root = Path(file).resolve().parents[depth - 1] if file else None
            return f"{name}:{cls.__qualname__}", root
        if file is None:
            raise CodeError(
                f"the class {cls.__qualname__} was typed into an interactive session, where no "
                "worker can import it; put it into a module (or use populace.local())"
            )
        return f"{Path(file).stem}:{cls.__qualname__}", Path(file).resolve().parent
    return f"{name}:{cls.__qualname__}", _package_root(module)


class CodeLoader:
    """Loads classes for one run.

    Args:
        prefixes: installed packages from which code may come.
        roots: folders below which the scenario's folder must lie.
    """

    def __init__(self, prefixes: Iterable[str], roots: Iterable[Path]) -> None:
        self._prefixes = tuple(prefixes)
        self._roots = tuple(Path(r).resolve() for r in roots)
        self._folders: list[Path] = []
        self._cache: dict[str, Any] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> CodeLoader:
        """A loader with this process's prefixes and roots."""
        return cls(settings.prefixes, settings.roots)

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders below which scenarios and their files may lie."""
        return self._roots

    def add_folder(self, folder: str | Path) -> None:
        """Allow modules of a folder, and search it first.

        Raises:
            CodeError: the folder does not exist, or lies outside the code roots.
        """
        path = Path(folder).resolve()
        if not path.is_dir():
            raise CodeError(f"the scenario's folder {str(folder)!r} does not exist here")
        if not any(path == root or root in path.parents for root in self._roots):
            raise CodeError(
                f"the scenario's folder {str(folder)!r} is outside the folders from which these "
                f"services load code ({', '.join(map(str, self._roots)) or 'none'}); start the "
                "services where it lies, or with POPULACE_CODE_ROOTS set to it"
            )
        if path not in self._folders:
            self._folders.append(path)
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
            importlib.invalidate_caches()

    def trust(self, folder: Path) -> None:
        """Allow modules of a folder from which this process has imported code already."""
        if folder not in self._folders:
            self._folders.append(folder)

    def register(self, path: str, value: Any) -> None:
        """Let a path stand for a class that this process holds already (local mode)."""
        self._cache[path] = value

    def path_of(self, cls: type) -> str:
        """The import path under which other processes find a class.

        Raises:
            CodeError: they could not.
        """
        return import_path(cls)[0]

    def is_installed(self, path: str) -> bool:
        """Whether the path lies under an allowed prefix, so that no folder is needed."""
        module = path.partition(":")[0]
        return any(module == p or module.startswith(p + ".") for p in self._prefixes)

    def load(self, path: str, base: type | None = None, folder: str | None = None) -> Any:
        """The class (or other object) that a path names.

        Args:
            path: ``module:Name``; a name may have dots for nested classes.
            base: what the class must derive from.
            folder: where it is imported from, if it isn't installed.

        Raises:
            CodeError: the path is malformed, not allowed, or leads nowhere; or the class is
                of another kind.
        """
        value = self._cache.get(path)
        if value is None:
            if folder is not None and not self.is_installed(path):
                self.add_folder(folder)
            value = self._import(path)
            self._cache[path] = value
        if base is not None and not (isinstance(value, type) and issubclass(value, base)):
            raise CodeError(f"{path!r} is not a subclass of {base.__name__}")
        return value

    def _import(self, path: str) -> Any:
        module_name, colon, attributes = path.partition(":")
        if not colon:
            module_name, _, attributes = path.rpartition(".")
        if (
            not module_name
            or not attributes
            or (
                not attributes.isidentifier()
                and not all(part.isidentifier() for part in attributes.split("."))
            )
        ):
            raise CodeError(f"{path!r} is not an import path; write it as 'module:Class'")
        self._check_allowed(module_name, path)
        try:
            value: Any = _module(module_name)
        except CodeError:
            raise
        except ModuleNotFoundError as error:
            raise CodeError(f"{path!r} can't be imported: {error}") from error
        except Exception as error:
            hint = ""
            if "asyncio.run() cannot be called" in str(error):
                hint = (
                    "; a worker imports the script to find the class, so let the script's last "
                    'lines run only under  if __name__ == "__main__":'
                )
            raise CodeError(
                f"importing {module_name!r} for {path!r} raised {type(error).__name__}: "
                f"{error}{hint}"
            ) from error
        for part in attributes.split("."):
            try:
                value = getattr(value, part)
            except AttributeError:
                raise CodeError(
                    f"{path!r} can't be imported: the module {module_name!r} has no {part!r}"
                ) from None
        return value

    def _check_allowed(self, module_name: str, path: str) -> None:
        top = module_name.partition(".")[0]
        for folder in self._folders:
            for own in OWN_PACKAGES:
                clash = folder / own
                is_ours = (clash / "__init__.py").exists() and _is_own(clash)
                if (clash.is_dir() and (clash / "__init__.py").exists() and not is_ours) or (
                    folder / f"{own}.py"
                ).exists():
                    raise CodeError(
                        f"the folder {folder.name!r} has a module named {own!r}, which is the "
                        "name of a package of Populace itself; rename yours"
                    )
        if self.is_installed(path):
            return
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise CodeError(f"{path!r} can't be imported: there is no module named {top!r}")
        places = [Path(p).resolve() for p in (spec.submodule_search_locations or [])]
        if spec.origin and spec.origin not in ("built-in", "frozen"):
            places.append(Path(spec.origin).resolve())
        for folder in self._folders:
            # Directly in the folder: a virtual environment below it doesn't count.
            if any(folder in (place.parent, place.parent.parent) for place in places):
                return
        raise CodeError(
            f"{path!r} may not be loaded: {top!r} is neither in the scenario's folder nor under "
            f"an allowed prefix ({', '.join(self._prefixes) or 'none'}; POPULACE_CODE_PREFIXES)"
        )


def _module(name: str) -> Any:
    """The module; the running script is not imported a second time under its own name."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    own = spec.name.removesuffix(".__main__") if spec is not None else file and Path(file).stem
    return main if own == name else importlib.import_module(name)


class LocalLoader(CodeLoader):
    """For agents and callers in one process: every class at hand may be used."""

    def __init__(self) -> None:
        super().__init__((), ())

    @property
    def roots(self) -> tuple[Path, ...]:
        """The program may read whatever it may."""
        return (Path(Path.cwd().anchor),)

    def path_of(self, cls: type) -> str:
        """A name for the class, good within this process."""
        path = f"{cls.__module__}:{cls.__qualname__}"
        self.register(path, cls)
        return path

    def is_installed(self, path: str) -> bool:
        """Nothing needs a folder."""
        return True


def _is_own(folder: Path) -> bool:
    """Whether a folder is the very package of ours that this process runs (a checkout)."""
    spec = importlib.util.find_spec(folder.name)
    return bool(
        spec and spec.origin and Path(spec.origin).resolve() == (folder / "__init__.py").resolve()
    )
