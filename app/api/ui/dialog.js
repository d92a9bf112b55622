// Dialogs for everything that changes something: first what is wanted, then its effect, then the change.

import { announce, h, visible } from "./dom.js";

/** Return an error about one field of a form, as the API reports them. */
export function invalid(field, message) {
  return Object.assign(new Error(message), { fields: [{ field, message }] });
}

/** Return the control for a field of the API: its name may be the path, or a part of it. */
function controlOf(form, path, names) {
  const parts = path.split(".");
  const wanted = [...parts.map((_, at) => parts.slice(at).join(".")), ...parts];
  return wanted.map((each) => form.elements.namedItem(names[each] ?? each)).find(Boolean);
}

function clearErrors(form) {
  for (const each of form.querySelectorAll(".field-error")) each.remove();
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
}

/** Show errors at their controls. Returns those without one. */
function markFields(form, fields, names) {
  const marked = fields.map(({ field, message }) => {
    const control = controlOf(form, field, names);
    control?.setAttribute("aria-invalid", "true");
    control?.after(h("p", { class: "error field-error", role: "alert" }, message));
    return control;
  });
  marked.find(Boolean)?.focus();
  return fields.filter((_, at) => !marked[at]);
}

/**
 * Open a dialog.
 *
 * form: controls to fill in, or null to confirm only. `review(values)` returns {lines, confirm, danger} - what the change
 * does, and the button's text - and may raise for values that are not valid. `apply(values)` makes the change and returns
 * the text to announce. `done` is called afterwards. `names` has the name of a control where the API's field has another.
 */
export function openDialog({ title, form = null, review, apply, done = () => {}, names = {} }) {
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

  function showError(raised) {
    const fields = raised.fields ?? [];
    const isInForm = form !== null && fields.some(({ field }) => controlOf(frame, field, names));
    if (isInForm) show(false);
    const others = isInForm ? markFields(frame, fields, names) : fields;
    if (isInForm && !others.length) return;
    error.replaceChildren(visible(raised.message), others.length ? h("ul", {}, others.map(({ field, message }) => h("li", {}, `${field}: ${message}`))) : "");
  }

  async function submit(event) {
    event?.preventDefault();
    forward.disabled = true;
    forward.setAttribute("aria-busy", "true");
    error.replaceChildren();
    clearErrors(frame);
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
      showError(raised);
    } finally {
      forward.disabled = false;
      forward.removeAttribute("aria-busy");
    }
  }

  document.body.append(dialog);
  dialog.showModal();
  if (form === null) submit();
  return dialog;
}
