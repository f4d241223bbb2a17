// The whole page: who looks at it, what they may do, and which of its views is open.

import { ask, storedKey, storeKey } from "../lib/api.js";
import { History } from "../lib/history.js";
import { html, useCallback, useEffect, useRef, useState } from "../lib/ui.js";
import { watch } from "../lib/watch.js";
import { useLoads } from "../lib/loads.js";
import { ChatView } from "./chat.js";
import { FitView } from "./fit.js";
import { Header } from "./header.js";
import { KeyForm } from "./key.js";
import { LogView } from "./log.js";
import { Overview } from "./overview.js";

const RETRY_MS = 1500;

/** @returns the views of these rights, the first being where everybody begins */
function viewsFor(rights) {
  const views = [{ name: "overview", label: "Overview" }];
  if (rights.infer) {
    views.push({ name: "chat", label: "Chat" });
  }
  if (rights.manage) {
    views.push({ name: "fit", label: "Fit" });
  }
  if (rights.observe || rights.manage) {
    views.push({ name: "log", label: "Log" });
  }
  return views;
}

/** @returns {string} the view that the address names; `#fit/NAME` has more behind it */
function viewInAddress() {
  return location.hash.slice(1).split("/")[0];
}

/** The page. */
export function App() {
  const [session, setSession] = useState(null);
  const [refusal, setRefusal] = useState(null);
  const [connection, setConnection] = useState("opening");
  const [attempt, setAttempt] = useState(0);

  useEffect(() => {
    const leaving = new AbortController();
    let timer = 0;
    ask("api/session", { signal: leaving.signal }).then(
      (found) => {
        setRefusal(null);
        setSession(found);
      },
      (error) => {
        if (leaving.signal.aborted) {
          return;
        }
        if (error.status === 401) {
          setRefusal(storedKey() ? "The server does not know this key." : "");
        } else {
          setConnection("lost");
          timer = setTimeout(() => setAttempt((before) => before + 1), RETRY_MS);
        }
      },
    );
    return () => {
      leaving.abort();
      clearTimeout(timer);
    };
  }, [attempt]);

  const enterKey = useCallback((key) => {
    storeKey(key);
    setSession(null);
    setRefusal(null);
    setConnection("opening");
    setAttempt((before) => before + 1);
  }, []);

  if (refusal !== null) {
    return html`<${KeyForm} problem=${refusal} onKey=${enterKey} />`;
  }
  if (session === null) {
    const lost = "The server does not answer. Trying again.";
    const text = connection === "lost" ? lost : "Connecting.";
    return html`<main class="alone"><h1>mlxd</h1><p role="status">${text}</p></main>`;
  }
  return html`<${Desk}
    session=${session}
    onRefused=${() => setRefusal("The server does not know this key any more.")}
    onKey=${enterKey}
  />`;
}

/** Everything for somebody who was let in. */
function Desk({ session, onRefused, onKey }) {
  const { rights } = session;
  const views = viewsFor(rights);
  const [status, setStatus] = useState(null);
  const [models, setModels] = useState(null);
  const [connection, setConnection] = useState("opening");
  const [view, setView] = useState(viewInAddress());
  const history = useRef(null);
  history.current ??= new History();
  const loads = useLoads();

  useEffect(() => {
    const leaving = new AbortController();
    void watch({
      observes: rights.observe,
      onStatus: (now) => {
        history.current.add(now);
        setStatus(now);
        loads.look();
      },
      onModels: (listed) => {
        setModels(listed);
        if (!rights.observe) {
          loads.look();
        }
      },
      onConnection: setConnection,
      onRefused,
      signal: leaving.signal,
    });
    return () => leaving.abort();
  }, [session]);

  useEffect(() => {
    const turn = () => setView(viewInAddress());
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);

  const open = views.some(({ name }) => name === view) ? view : "overview";
  const label = views.find(({ name }) => name === open).label;
  useEffect(() => {
    document.title = `${label} · mlxd`;
  }, [label]);

  const shared = { models: models ?? [], rights, loads };
  return html`
    <a class="skip" href="#main" onClick=${skipToMain}>Skip to the content</a>
    <${Header} ...${{ views, open, connection, status, session, onKey }} />
    ${connection === "lost" &&
    html`<p class="banner" role="alert">The connection is lost. Trying again.</p>`}
    <main id="main" tabindex="-1" class=${`view-${open}`}>
      <h1 class="hidden">${label}</h1>
      ${open === "overview" &&
      html`<${Overview} ...${shared} ...${{ status, history: history.current, models }} />`}
      ${open === "fit" && html`<${FitView} ...${shared} />`}
      ${open === "log" && html`<${LogView} ...${shared} />`}
      ${rights.infer && html`<${ChatView} ...${shared} hidden=${open !== "chat"} />`}
    </main>
  `;
}

/** Move the focus; the address keeps the name of the view. */
function skipToMain(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}
