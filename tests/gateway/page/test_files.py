"""The page's files: who gets them, what a browser lets them do, and whose they are."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import vendor_page
from mlxd_gateway.page.files import FILES, ROOT
from mlxd_shared.security.tokens import Token
from tests.fakes.mlxd_server import Answers, serving
from tests.support.gateways import gateway_over

SECRET = "a-token-of-sixteen-letters"
STATIC = vendor_page.FOLDER.parent
OWN = [path for path in STATIC.rglob("*") if path.is_file() and "vendor" not in path.parts]
SOURCE = re.compile(r"""(?:from |import |import\(|href=|src=|url\()["']([^"']+)["']""")
MODULE_LINES_MAX = 250


@pytest.mark.asyncio
async def test_the_page_is_open_and_what_feeds_it_is_not() -> None:
    """Whoever has no credentials gets the files, which ask for them, and nothing else."""
    async with (
        serving(Answers()) as fake,
        gateway_over(fake.address, token=Token(SECRET)) as web,
    ):
        for path in (ROOT, "/page/main.js", "/page/styles/base.css", "/page/vendor/uPlot.js"):
            assert (await web.http.get(path)).status_code == 200, path
        for path in ("session", "models", "watch", "logs?model=demo"):
            refused = await web.http.get(f"/page/api/{path}")
            assert (refused.status_code, refused.json()["error"]["kind"]) == (
                401,
                "unauthenticated",
            )
        for path in ("load", "unload", "fit"):
            refused = await web.post(f"/page/api/{path}", {"model": "demo"})
            assert refused.status_code == 401, path
        for path in ("/page/vendor/vendored.json", "/page/../app.py", "/page/nothing"):
            assert (await web.http.get(path)).status_code == 401, path
        assert fake.requests == []


@pytest.mark.asyncio
async def test_the_page_of_a_stranger_does_not_get_it() -> None:
    """A name that a stranger resolves to this machine is refused; the page's own origin is not."""
    async with serving(Answers()) as fake, gateway_over(fake.address) as web:
        own = {"Origin": web.url, "Host": web.url.removeprefix("http://")}
        body = {"model": "demo"}
        assert (await web.http.get(ROOT, headers={"Host": "else.example"})).status_code == 403
        strange = {"Origin": "https://else.example"}
        assert (await web.post("/page/api/unload", body, headers=strange)).status_code == 403
        assert fake.requests == []
        assert (await web.post("/page/api/unload", body, headers=own)).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_no_image_of_a_stranger_opens_a_watch(site: str) -> None:
    """Its request has no Origin, but browsers say whence it comes; links to the page go on."""
    async with serving(Answers()) as fake, gateway_over(fake.address) as web:
        strange = {"Sec-Fetch-Site": site}
        for path in ("session", "models", "watch", "logs?model=demo"):
            refused = await web.http.get(f"/page/api/{path}", headers=strange)
            assert (refused.status_code, refused.json()["error"]["kind"]) == (403, "forbidden")
        assert fake.requests == []
        assert (await web.http.get(ROOT, headers=strange)).status_code == 200
        for own in ("same-origin", "none"):
            answer = await web.http.get("/page/api/models", headers={"Sec-Fetch-Site": own})
            assert answer.status_code == 200


@pytest.mark.asyncio
async def test_browsers_are_sent_to_the_page_and_ollamas_clients_are_not() -> None:
    """GET / tells the two apart by what they accept, and asks neither for credentials."""
    async with (
        serving(Answers()) as fake,
        gateway_over(fake.address, token=Token(SECRET)) as web,
    ):
        browser = await web.http.get("/", headers={"Accept": "text/html,*/*;q=0.8"})
        assert (browser.status_code, browser.headers["location"]) == (307, ROOT)
        client = await web.http.get("/")
        assert (client.status_code, client.text) == (200, "mlxd is running")


@pytest.mark.asyncio
async def test_a_browser_is_told_to_run_these_files_alone() -> None:
    """No other origin, no inline script, no frame, no markup made of text; 304 for what it has."""
    async with serving(Answers()) as fake, gateway_over(fake.address) as web:
        for path in FILES:
            answer = await web.http.get(path)
            policy = dict(
                part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
            )
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            known = {"If-None-Match": answer.headers["etag"]}
            again = await web.http.get(path, headers=known)
            assert (again.status_code, again.content) == (304, b"")


def test_every_file_that_is_named_is_there() -> None:
    """What our files import and link lies beside them; nothing comes from elsewhere."""
    for path in OWN:
        for name in SOURCE.findall(path.read_text(encoding="utf-8")):
            if not name.startswith("#"):
                folder = path.parent if name.startswith((".", "..")) else STATIC
                assert (folder / name).resolve().is_file(), f"{path}: {name}"


def test_a_module_can_be_read_at_a_glance() -> None:
    """At most 250 lines, and no way from text to markup."""
    for path in OWN:
        if path.suffix == ".js":
            text = path.read_text(encoding="utf-8")
            assert len(text.splitlines()) <= MODULE_LINES_MAX, path
            assert not re.search("innerHTML|dangerously|insertAdjacent|document.write|eval", text)


def test_the_vendored_files_are_those_that_were_published() -> None:
    """Every one has the hash of its package's own, and each package its licence."""
    assert vendor_page.find_faults() == []
    licences = {path.name for path in vendor_page.FOLDER.glob("LICENSE.*")}
    assert licences == {"LICENSE.htm", "LICENSE.preact", "LICENSE.uPlot"}


def test_a_vendored_file_that_was_changed_is_found(tmp_path: Path) -> None:
    """A changed one, a missing one, and one that nobody has published."""
    folder = tmp_path / "vendor"
    shutil.copytree(vendor_page.FOLDER, folder)
    with (folder / "uPlot.js").open("a", encoding="utf-8") as file:
        file.write("\n")
    (folder / "htm-preact.js").unlink()
    (folder / "more.js").touch()
    assert vendor_page.find_faults(folder) == [
        "more.js is in no package", "htm-preact.js is missing", "uPlot.js was changed",
    ]  # fmt: skip
