// The head of the page: its views, how the connection is, the theme, and the key.

import { storedKey } from "../lib/api.js";
import { duration } from "../lib/format.js";
import { html, useEffect, useState } from "../lib/ui.js";

const THEME = "mlxd.theme";
const THEMES = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
const CONNECTIONS = { opening: "Connecting", live: "Connected", lost: "Disconnected" };

/** @param {any} props */
export function Header({ views, open, connection, status, session, onKey }) {
  const uptime = status && duration(status.now - status.start);
  return html`
    <header class="top">
      <a class="brand" href="#overview"><img src="icon.svg" alt="" width="22" height="22" />mlxd</a>
      <nav aria-label="Views">
        ${views.map(
          ({ name, label }) => html`
            <a key=${name} href=${`#${name}`} aria-current=${name === open ? "page" : null}>
              ${label}
            </a>
          `,
        )}
      </nav>
      <div class="top-end">
        <span class=${`connection ${connection}`} role="status">
          <span class="dot" aria-hidden="true"></span>
          <span class="connection-text">${CONNECTIONS[connection]}</span>
        </span>
        <span class="version">
          ${session.version}${uptime && html`<span class="uptime"> · up ${uptime}</span>`}
        </span>
        <${ThemeButton} />
        ${storedKey() &&
        html`<button class="quiet" onClick=${() => onKey("")}>Forget key</button>`}
      </div>
    </header>
  `;
}

/** Turns from the system's theme to light, to dark, and back. */
function ThemeButton() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME) ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
    dispatchEvent(new Event("mlxd-theme"));
  }, [theme]);
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(theme) + 1) % names.length];
  return html`
    <button
      class="quiet icon"
      aria-label=${THEMES[theme]}
      title=${THEMES[theme]}
      onClick=${() => setTheme(next)}
    >
      <span class=${`theme-mark ${theme}`} aria-hidden="true"></span>
    </button>
  `;
}
