"""The six icon sets' categories, as the subgroups and groups of one corpus."""

from __future__ import annotations

UNCATEGORISED = "uncategorised"
BRAND = "brands"
#: group: {subgroup: the sets' categories}. The order breaks ties; the group interface counts only if no other does.
GROUPS: dict[str, dict[str, str]] = {
    "animals nature": {
        "animals": "animals|animal",
        "nature": "nature|agriculture",
        "weather": "weather",
        "zodiac": "zodiac",
    },
    "food drink": {"food": "food|food / drink"},
    "people": {
        "users": "users|account / user|user & faces|people|people / family|gender",
        "faces": "mood|emoji",
        "gestures": "gestures",
        "clothing": "clothing",
    },
    "health": {"medicine": "health|medical|medical / hospital|health & medical", "beauty": "health / beauty"},
    "travel places": {
        "maps": "map|location and map|navigation|geographic information system|places",
        "buildings": "buildings|construction",
        "vehicles": "vehicles|transport|automotive",
        "roads": "transportation + road",
        "flying": "transportation + flying",
        "water transport": "transportation + water",
        "other transport": "transportation + other",
    },
    "activities": {
        "sports": "sport|sports|game & sports",
        "games": "games|gaming / rpg",
        "holidays": "holiday",
        "religion": "religion",
        "art": "drawing / art",
    },
    "home tools": {
        "home automation": "home automation",
        "laundry": "laundry",
        "tools": "hardware / tools",
        "electricity": "electrical",
    },
    "commerce": {
        "money": "finance|currencies|currency|banking",
        "shopping": "e-commerce|commerce|shopping",
        "business": "business|office",
    },
    "science education": {
        "mathematics": "math|logic",
        "science": "science",
        "education": "education",
        "charts": "charts",
    },
    "devices": {
        "telephones": "cellphone / phone",
        "computers": "computers",
        "batteries": "battery",
        "printers": "printer",
        "other devices": "devices|device|device / tech",
    },
    "media": {
        "photography": "photography|photography tools",
        "music": "music|audio",
        "video": "video / movie",
        "other media": "media|multimedia",
    },
    "communication": {
        "chat": "chat|tooltip",
        "notifications": "notification|alert / error",
        "social media": "social media",
        "other communication": "communication",
    },
    "computing": {
        "databases": "database",
        "clouds": "cloud|cloud and web",
        "version control": "version control",
        "programming": "development|developer / languages|extensions",
        "security": "lock|security",
    },
    "documents": {
        "files": "document|files / folders|file and folder",
        "text": "text|text / content / format|content|editor",
        "forms": "form",
        "editing": "edit / modify",
    },
    "signs": {
        "arrows": "arrows|arrow",
        "letters": "letters|alpha / numeric",
        "numbers": "numbers",
        "shapes": "shapes|shape",
        "badges": "badges",
        "time": "time|date / time",
        "symbols": "symbols|sign and symbol",
    },
    BRAND: {"logos": "brand|brand / logo|brand logos|logos"},
    "interface": {
        "colours": "color",
        "vectors": "vector",
        "arrangement": "arrange",
        "design": "design|design tools",
        "views": "view",
        "settings": "settings",
        "system": "system|user interface",
        "other objects": "objects|others",
    },
}
VAGUE = "interface"
SUBGROUP = {c: sub for subs in GROUPS.values() for sub, names in subs.items() for c in names.split("|")}
GROUP = {sub: group for group, subs in GROUPS.items() for sub in subs} | {UNCATEGORISED: UNCATEGORISED}
RANK = {sub: i for i, sub in enumerate(GROUP)}
