"""What a build gave, for the summary and for who calls it from Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from padless.runtime.format import Manifest, SplitsManifest


@dataclass
class BuildResult:
    """What a build gave: the manifest of each split ("" for a folder of one), and how it went."""

    output: str
    manifests: dict[str, Manifest]
    manifest: Manifest | SplitsManifest
    backends: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    """source -> the format it was taken for."""
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """source -> its columns, where they told its format."""
    seconds: float = 0.0
    profile: dict[str, float] = field(default_factory=dict)
    """stage -> seconds."""
    chunks: int = 0
    """Parts that the sources were tokenized in, those of an earlier run among them."""
    resumed_chunks: int = 0
    replaced_surrogates: int = 0
    was_finished: bool = False
