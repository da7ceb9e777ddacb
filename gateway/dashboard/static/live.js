// Keeps what is marked `data-live` up to date: the server says that something changed, htmx fetches
// the page again and replaces that part. Nothing is replaced under somebody's hands: not while the
// focus or a selection is in it, not while the page is hidden, and not what stands open in it.
(() => {
  const target = document.querySelector("[data-live]");
  const mark = document.getElementById("live-mark");
  if (!target || !window.EventSource || !window.htmx) return;
  let changed = false;

  const busy = () => {
    const live = document.querySelector("[data-live]");
    const selection = document.getSelection();
    return (
      document.hidden ||
      !live ||
      live.contains(document.activeElement) ||
      live.querySelector("details[open]") !== null ||
      (selection && !selection.isCollapsed && live.contains(selection.anchorNode))
    );
  };
  const refresh = () => {
    // Something that is still being counted is asked for again.
    if (document.querySelector("[data-pending]")) changed = true;
    if (!changed || busy()) return;
    changed = false;
    htmx.ajax("GET", location.pathname + location.search, {
      target: "[data-live]",
      select: "[data-live]",
      swap: "outerHTML",
    });
  };
  const stream = new EventSource("/ui/live");
  stream.addEventListener("changed", () => {
    changed = true;
    refresh();
  });
  stream.onopen = () => mark && (mark.textContent = "live");
  stream.onerror = () => mark && (mark.textContent = "not connected");
  setInterval(refresh, 2000);
  window.addEventListener("pagehide", () => stream.close());
})();
