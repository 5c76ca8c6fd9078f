"""Pictures of the server's page, in a real browser, of models of built-in data.

jumok serve demo=runs/demo scenes=runs/captioner reviews=runs/hierarchical
python docs/screenshots.py http://127.0.0.1:8000/ docs/figures
"""

import shutil
import sys
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

COLOURS = 256  # of a picture, so that it is small
SENTENCE = "the lawyer runs because her mother cannot choose the book"
DESK = {"viewport": {"width": 1180, "height": 860}}
PHONE = {"viewport": {"width": 360, "height": 930}, "device_scale_factor": 2}
PHONE |= {"is_mobile": True, "has_touch": True}


def main(address: str, folder: Path) -> None:
    """Both pictures."""
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        link = f"#model=demo&text={quote(SENTENCE)}&n_best=3"
        taken(browser, address + link, folder / "page.png", DESK)
        taken(browser, f"{address}#model=scenes", folder / "page_phone.png", PHONE)
        browser.close()


def taken(browser: Browser, address: str, path: Path, device: dict[str, object]) -> None:
    """One picture, once the viewer shows what the model looked at."""
    page = browser.new_page(**device)
    page.goto(address)
    if device is PHONE:
        page.get_by_role("button", name="Example 2").click()
    page.wait_for_selector(".jumok .jm-title")
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(0, 0)
    if device is PHONE:
        page.locator(".jm-caption .jm-token", has_text="star").click()
        page.evaluate("document.querySelector('.pg-out').scrollIntoView()")
    page.wait_for_timeout(1000)  # all tiles are drawn
    page.screenshot(path=path, full_page=device is DESK)
    page.close()
    Image.open(path).convert("RGB").quantize(COLOURS, kmeans=2).save(path, optimize=True)
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
