"""Versions of other libraries that fp4pass was not tested with are errors with a remedy."""

from __future__ import annotations

import pytest

from fp4pass._compat import require_version
from fp4pass.errors import Fp4PassError, VersionError


@pytest.mark.parametrize("installed", ["1.2", "1.9.3", "1.5.0+cpu", "1.4.dev20260101", "1.3rc1"])
def test_versions_in_the_range(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4pass._compat.installed_version", lambda package: installed)
    require_version("anything", ">=1.2,<2")


@pytest.mark.parametrize("installed", ["1.1.9", "2.0", "2.0.0+cpu", "2.0.1rc1"])
def test_versions_outside_the_range(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4pass._compat.installed_version", lambda package: installed)
    with pytest.raises(VersionError) as caught:
        require_version("anything", ">=1.2,<2")
    assert str(caught.value) == (
        "anything: expected version >=1.2,<2, which fp4pass was tested with, got "
        f"{installed}. Run pip install 'anything>=1.2,<2'."
    )
    assert isinstance(caught.value, Fp4PassError) and isinstance(caught.value, ImportError)


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(VersionError, match=r"got no installation.*'fp4pass\[eval\]'"):
        require_version("no-such-package-of-any-kind", ">=1", extra="eval")
