#!/bin/sh
# Install a headless Chromium for the tests of the report where that can be done, else say so. It is no error: the tests of the
# report in a browser are then skipped.
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing chromium-headless-shell for the tests of the report ..."
  (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    chromium-headless-shell fonts-liberation) >/dev/null 2>&1 && exit 0
fi
echo "There is no Chromium here: tests/report/test_report_browser.py will be skipped. apt-get install chromium-headless-shell"
