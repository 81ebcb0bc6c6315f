"""What an array is and how its data moves, for people: `Array.explain`, and tables in notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping

from flashwarp import config
from flashwarp.array.advice import Usage, advise
from flashwarp.array.attachment import Attachment
from flashwarp.device import host_memory
from flashwarp.explanation import Explanation
from flashwarp.storage import File
from flashwarp.storage.composite import members_of
from flashwarp.storage.file_access import room_for_pages
from flashwarp.transfer import pool_of


def explain(attachment: Attachment, why: str) -> Explanation:
    """Explain an open array; `why` says how its storage was chosen."""
    storage, service = attachment.storage, attachment.launcher.service
    cache, device = repr(attachment.cache), attachment.device.describe()
    if not attachment.cache.owned:
        facts = {"storage": {"path": storage.path}, "engine": "the owner's"}
        facts |= {"cache": cache, "device": device}
        return Explanation(service.route, service.reason + attachment.note(), facts)
    copies = attachment.launcher.copies
    if why and service.changes:
        why = f"when it was opened, {why}"
    return Explanation(
        service.route,
        "; ".join(filter(None, (service.reason, why))) + attachment.note(),
        {
            # A caller may have closed the storage, which the service still serves.
            "storage": {"closed": True} if storage.closed else storage.describe(),
            "engine": service.describe().get("engine", "stopped"),
            "cache": f"{cache}{attachment.launcher.volume.tier_note()}",
            "device": device + pool_of(attachment.device).note("; "),
            # On a GPU, what reads ranges of rows, and how much copy engines have read.
            "ranges": "" if copies is None else copies.note(),
        },
        advise(_usage(attachment)),
    )


def _usage(attachment: Attachment) -> Usage:
    launcher, cache = attachment.launcher, attachment.cache
    parts = members_of(attachment.storage)
    files = [each for each in parts if isinstance(each, File) and not each.closed]
    described = [(file.describe(), file.review is not None) for file in files]
    available = host_memory.available_bytes()
    return Usage(
        nbytes=launcher.format.nbytes,
        row_bytes=launcher.format.row_bytes,
        line_bytes=cache.line_bytes,
        capacity=cache.capacity,
        host_memory=cache.host_memory if launcher.volume.in_host_tier else 0,
        on_cpu=launcher.on_cpu,
        in_place=launcher.service.route == "in_place",
        o_direct=any(facts["o_direct"] and not may_change for facts, may_change in described),
        alignment=max((int(facts.get("alignment", 1)) for facts, _ in described), default=1),
        device_free_bytes=attachment.device.memory_info().free_bytes,
        host_free_bytes=available,
        page_room=room_for_pages(available, 0, config.current()),
        calls=launcher.moved.calls,
        rows=launcher.moved.rows,
        stats=attachment.stats(),
    )


def live_facts(attachment: Attachment) -> dict[str, object]:
    """Return what the table of an open array says beside shape, dtype and path."""
    service, stats = attachment.launcher.service, attachment.stats()
    return {
        "device": attachment.device.describe(),
        "cache": repr(attachment.cache),
        "route": f"{service.route}: {service.reason}",
        "hits": f"{stats.hits} ({stats.hit_rate:.1%})",
        "misses": stats.misses,
        "read": f"{stats.bytes_read} bytes in {stats.commands} commands",
        "written": f"{stats.bytes_written} bytes",
    }


def html_table(title: str, facts: Mapping[str, object]) -> str:
    """Return a small HTML table of facts, all text escaped."""
    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table><caption>{html.escape(title)}</caption><tbody>{rows}</tbody></table>"
