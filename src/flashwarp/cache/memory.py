"""The memory of a cache: its frames, its metadata, and the frames of its host tier.

The metadata are the cache's struct, the table of volumes, and then tags, policy words, set control
and the tier's tags. They do not grow with the data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from flashwarp import _native
from flashwarp.cache.sizes import TierShape, geometry_of
from flashwarp.cache.structs import GeometryStruct, LineCacheStruct, VolumeStruct
from flashwarp.device import Device, DeviceMemory
from flashwarp.policy import Policy
from flashwarp.transfer import pool_of

VOLUMES_MAX = 64
# `kPolicyWordsAlignment`: the words follow the tags at a multiple of this.
_POLICY_WORDS_ALIGNMENT = 128

_VOLUMES_AT = ctypes.sizeof(LineCacheStruct)
_END_OF_VOLUMES = _VOLUMES_AT + VOLUMES_MAX * ctypes.sizeof(VolumeStruct)
# Before the tags: policy_refusals() in the header.
_TAGS_AT = _END_OF_VOLUMES + _POLICY_WORDS_ALIGNMENT
# Of a client, behind the volumes: `owner_requests`, and then a word for the holder of each slot.
_REQUESTS_BYTES = 64


@dataclass(frozen=True)
class Layout:
    """Where in the metadata of a cache its parts lie, in bytes from the tags."""

    control: int
    """Set control, behind tags and policy words."""
    end: int
    """Of what each cache has; the tags of the host tier follow."""

    @classmethod
    def of(cls, sets: int, ways: int, policy: Policy) -> Layout:
        """Lay out a cache of so many sets."""
        lines = sets * ways
        control = lines * 8
        if policy.keeps_words:
            control = -(-control // _POLICY_WORDS_ALIGNMENT) * _POLICY_WORDS_ALIGNMENT + lines * 4
        return cls(control, control + -(-sets * 4 // 8) * 8)

    @property
    def nbytes(self) -> int:
        """Bytes of all metadata of a cache without a host tier."""
        return _TAGS_AT + self.end


@dataclass
class CacheMemory:
    """The memory of one cache. `metadata_bytes` counts the bytes of metadata for lines and sets."""

    geometry: GeometryStruct
    metadata: DeviceMemory
    frames: DeviceMemory
    more: DeviceMemory | None = None
    """The frames of the host tier; or of a client, the owner's metadata, which has the tags."""
    metadata_bytes: int = 0
    set_control: int = 0
    borrowed: bool = False
    """Whether all but the metadata is another's, which closes it."""

    def _struct(self, volumes: int) -> LineCacheStruct:
        return LineCacheStruct(
            geometry=self.geometry,
            set_control=self.set_control,
            volumes=volumes,
            page_bytes=2 << 20,
        )

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
        layout = Layout.of(sets, ways, policy)
        metadata_bytes = layout.end + tier.places * 8
        frames = allocate(sets * ways * line_bytes)
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
        made.set_control = tags + layout.control
        struct = made._struct(made.volumes)
        if tier_frames is not None:
            struct.tier_ways = tier.ways
            struct.tier.tags = tags + layout.end
            struct.tier.frames = tier_frames.address
            struct.tier.subsets = tier.subsets
        device.upload(metadata.address, bytes(struct))
        return made

    @classmethod
    def of_client(
        cls,
        device: Device,
        geometry: GeometryStruct,
        tags: DeviceMemory,
        frames: DeviceMemory,
        table: int,
        slots: int,
    ) -> CacheMemory:
        """Allocate a client's own structs, by the owner's memory and the table of requests."""
        metadata = device.allocate(_END_OF_VOLUMES + _REQUESTS_BYTES + 4 * slots)
        made = cls(geometry, metadata, frames, tags)
        owner = metadata.address + _END_OF_VOLUMES
        struct = LineCacheStruct(geometry=geometry, volumes=made.volumes, owner=owner)
        device.upload(metadata.address, bytes(struct))
        holders = owner + _REQUESTS_BYTES
        line = 1 << geometry.line_shift
        device.upload(owner, _native.requests_of(table, slots, line, holders))
        return made

    @classmethod
    def mapped(
        cls,
        metadata: DeviceMemory,
        frames: DeviceMemory,
        sets: int,
        ways: int,
        line_bytes: int,
        policy: Policy,
    ) -> CacheMemory:
        """Take memory that another process has `allocated`, without a host tier."""
        layout = Layout.of(sets, ways, policy)
        tags = metadata.address + _TAGS_AT
        geometry = geometry_of(tags, frames.address, sets, ways, line_bytes)
        made = cls(geometry, metadata, frames, None, layout.end)
        made.set_control = tags + layout.control
        return made

    def for_gpu(self, device: Device) -> CacheMemory:
        """Allocate the structs of a GPU that shares the cache: they name its own queues."""
        metadata = device.allocate(_END_OF_VOLUMES)
        made = CacheMemory(
            self.geometry, metadata, self.frames, self.metadata, self.metadata_bytes, borrowed=True
        )
        device.upload(metadata.address, bytes(self._struct(made.volumes)))
        return made

    def refusals(self, device: Device) -> int:
        """Return how often the policy was refused a victim, a way or a word."""
        victims = self.metadata.address + LineCacheStruct.refusals.offset
        places = ((victims, 4), (self.geometry.tags - 8, 8))
        words = (device.download(place, nbytes) for place, nbytes in places)
        return sum(int.from_bytes(word, "little") for word in words)

    @property
    def volumes(self) -> int:
        """Address of the table of volumes."""
        return self.metadata.address + _VOLUMES_AT

    @property
    def owners(self) -> tuple[object, ...]:
        """The owners of all of it; see `DeviceMemory.owners`."""
        more = () if self.more is None else self.more.owners
        return *self.metadata.owners, *self.frames.owners, *more

    def close(self) -> None:
        """Free it. May be called twice."""
        if self.borrowed:
            self.metadata.close()
        else:
            _close(self.metadata, self.frames, self.more)


def _close(*memory: DeviceMemory | None) -> None:
    for each in memory:
        if each is not None:
            each.close()
