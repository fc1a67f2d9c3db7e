// The state of the page is in its address, "#tab/path?name=value": a copied address shows the same page.

const values = new URLSearchParams(location.hash.split("?")[1] ?? "");
let changed = () => {};

/** Calls back after every change of the address. */
export function onChange(callback) {
  changed = callback;
  addEventListener("hashchange", () => {
    for (const name of [...values.keys()]) values.delete(name);
    for (const [name, value] of new URLSearchParams(location.hash.split("?")[1] ?? "")) values.append(name, value);
    callback();
  });
}

export function path() {
  return (location.hash.slice(1).split("?")[0] || "overview").split("/");
}

export function get(name, otherwise = "") {
  return values.get(name) ?? otherwise;
}

export function getAll(name) {
  return values.getAll(name);
}

/** Sets values, lists of values, or removes those that are "" or null. */
export function set(changes) {
  for (const [name, value] of Object.entries(changes)) {
    values.delete(name);
    for (const item of Array.isArray(value) ? value : [value]) if (item !== "" && item !== null) values.append(name, item);
  }
  // replaceState makes no entry in the browser's history: a slider would make hundreds of them.
  history.replaceState(null, "", address(...path()));
  changed();
}

/** The address of a tab with the present values, some of them changed. */
export function address(...place) {
  return `#${place.join("/")}${values.size ? `?${values}` : ""}`;
}
