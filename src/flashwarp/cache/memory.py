"""The memory of a cache: its frames, its metadata, and the frames of its host tier.

The metadata are the cache's struct, the table of volumes, the epochs of its entries, and then tags,
policy words, set control and the tier's tags. They do not grow with the data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from flashwarp.cache.sizes import TierShape, geometry_of
from flashwarp.cache.structs import EPOCH_BYTES, GeometryStruct, LineCacheStruct, VolumeStruct
from flashwarp.device import Device, DeviceMemory
from flashwarp.policy import Policy
from flashwarp.transfer import pool_of

VOLUMES_MAX = 64
# `kPolicyWordsAlignment`: the words follow the tags at a multiple of this.
_POLICY_WORDS_ALIGNMENT = 128

_VOLUMES_AT = ctypes.sizeof(LineCacheStruct)
_EPOCHS_AT = _VOLUMES_AT + VOLUMES_MAX * ctypes.sizeof(VolumeStruct)
# Before the tags: policy_refusals() in the header.
_TAGS_AT = _EPOCHS_AT + VOLUMES_MAX * EPOCH_BYTES + _POLICY_WORDS_ALIGNMENT


@dataclass
class CacheMemory:
    """The memory of one cache. `metadata_bytes` counts the bytes of metadata for lines and sets."""

    geometry: GeometryStruct
    metadata: DeviceMemory
    frames: DeviceMemory
    tier_frames: DeviceMemory | None = None
    metadata_bytes: int = 0

    @classmethod
    def allocated(
        cls,
        device: Device,
        allocate: Callable[[int], DeviceMemory],
        sets: int,
        ways: int,
        line_bytes: int,
        tier: TierShape,
        policy: Policy,
    ) -> CacheMemory:
        """Allocate the memory of an empty cache, the frames first."""
        lines = sets * ways
        tag_bytes, word_bytes = lines * 8, 0
        if policy.keeps_words:
            tag_bytes = -(-tag_bytes // _POLICY_WORDS_ALIGNMENT) * _POLICY_WORDS_ALIGNMENT
            word_bytes = lines * 4
        own_bytes = tag_bytes + word_bytes + -(-sets * 4 // 8) * 8
        metadata_bytes = own_bytes + tier.places * 8
        frames = allocate(lines * line_bytes)
        tier_frames: DeviceMemory | None = None
        try:
            if tier.places:
                tier_frames = pool_of(device).reserve("host tiers", tier.places * line_bytes)
            metadata = allocate(_TAGS_AT + metadata_bytes)
        except BaseException:
            _close(frames, tier_frames)
            raise
        tags = metadata.address + _TAGS_AT
        geometry = geometry_of(tags, frames.address, sets, ways, line_bytes)
        made = cls(geometry, metadata, frames, tier_frames, metadata_bytes)
        struct = LineCacheStruct(
            geometry=geometry,
            set_control=tags + tag_bytes + word_bytes,
            volumes=made.volumes,
            page_bytes=2 << 20,
        )
        if tier_frames is not None:
            struct.tier_ways = tier.ways
            struct.tier.tags = tags + own_bytes
            struct.tier.frames = tier_frames.address
            struct.tier.subsets = tier.subsets
        device.upload(metadata.address, bytes(struct))
        return made

    @property
    def volumes(self) -> int:
        """Address of the table of volumes."""
        return self.metadata.address + _VOLUMES_AT

    @property
    def epochs(self) -> int:
        """Address of the epochs of its entries."""
        return self.metadata.address + _EPOCHS_AT

    @property
    def owners(self) -> tuple[object, ...]:
        """The owners of all of it; see `DeviceMemory.owners`."""
        tier = () if self.tier_frames is None else self.tier_frames.owners
        return *self.metadata.owners, *self.frames.owners, *tier

    def close(self) -> None:
        """Free it. May be called twice."""
        _close(self.metadata, self.frames, self.tier_frames)


def _close(*memory: DeviceMemory | None) -> None:
    for each in memory:
        if each is not None:
            each.close()
