// A wide table scrolls by the keyboard, too (WCAG 2.1, 2.1.1).
new MutationObserver(() => document.querySelectorAll(".md-typeset__scrollwrap").forEach((each) => (each.tabIndex = 0)))
  .observe(document.documentElement, { childList: true, subtree: true });
