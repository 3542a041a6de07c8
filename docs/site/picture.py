"""Render the site's first page in a headless Chromium: `make pictures` writes docs/pictures/first-page.png."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURE = ROOT / "build" / "docs" / "index.html", ROOT / "docs" / "pictures" / "first-page.png"
# The last seven keep it from calling other machines.
OPTIONS = (
    "--headless --hide-scrollbars --window-size=1600,1000 --virtual-time-budget=5000 --no-sandbox --disable-gpu "
    "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
)


def main():
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("picture: no chromium on this machine; install it (Debian: apt-get install chromium)")
    if not PAGE.exists():
        sys.exit(f"picture: {PAGE} is not there; run `make docs` before")
    PICTURE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        where = [f"--user-data-dir={profile}", f"--screenshot={PICTURE}", PAGE.as_uri()]
        subprocess.run([browser, *OPTIONS.split(), *where], check=True, capture_output=True, timeout=120)
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
