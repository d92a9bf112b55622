// Dialogs for everything that changes something: first what is wanted, then its effect, then the change.

import { announce, h } from "./dom.js";

function problem(error) {
  const fields = (error.fields || []).map(({ field, message }) => h("li", {}, `${field}: ${message}`));
  return [error.message, fields.length ? h("ul", {}, fields) : null].filter(Boolean);
}

/**
 * Open a dialog.
 *
 * form: controls to fill in, or null to confirm only. `review(values)` returns {lines, confirm, danger} - what the change
 * does, and the button's text - and may raise for values that are not valid. `apply(values)` makes the change and returns
 * the text to announce. `done` is called afterwards.
 */
export function openDialog({ title, form = null, review, apply, done = () => {} }) {
  const error = h("div", { class: "error", role: "alert" });
  const first = h("div", {}, form);
  const effect = h("div", { class: "effect", hidden: true });
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const back = h("button", { type: "button", hidden: true, onclick: () => show(false) }, "Back");
  const forward = h("button", { class: "primary" }, "Next: effect");
  const frame = h("form", { class: "dialog-form", onsubmit: submit },
    h("h2", { id: "dialog-title", tabindex: "-1" }, title), first, effect, error,
    h("div", { class: "buttons" }, cancel, back, forward));
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", onclose: () => dialog.remove() }, frame);
  let confirmed = null;

  function show(reviewing, shown = {}) {
    first.hidden = reviewing;
    effect.hidden = !reviewing;
    back.hidden = !reviewing || form === null;
    forward.textContent = reviewing ? shown.confirm : "Next: effect";
    forward.className = reviewing && shown.danger ? "danger" : "primary";
    error.replaceChildren();
    if (!reviewing) confirmed = null;
  }

  async function toReview() {
    const values = Object.fromEntries(new FormData(frame));
    const shown = await review(values);
    effect.replaceChildren(h("h3", {}, "Effect"), h("ul", {}, shown.lines.filter(Boolean).map((line) => h("li", {}, line))));
    show(true, shown);
    confirmed = values;
    if (form === null) cancel.focus();
    else dialog.querySelector("h2").focus();
  }

  async function submit(event) {
    event?.preventDefault();
    forward.disabled = true;
    error.replaceChildren();
    try {
      if (confirmed === null) {
        await toReview();
      } else {
        const text = await apply(confirmed);
        dialog.close();
        announce(text);
        await done();
        // What opened the dialog may be gone with what was shown before.
        if (document.activeElement === document.body) document.getElementById("main").focus({ preventScroll: true });
      }
    } catch (raised) {
      error.replaceChildren(...problem(raised));
    } finally {
      forward.disabled = false;
    }
  }

  document.body.append(dialog);
  dialog.showModal();
  if (form === null) submit();
  return dialog;
}
