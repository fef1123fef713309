"""Tests in a real browser: Debian's headless Chromium, which Playwright drives. Without it each one is skipped."""
